"""Faults of the server side, with real processes: SuperLink and ServerApp apart, one run in two lives.

    life 1   the ServerApp is killed while it writes the checkpoint of round 2 (F10)
    life 2   resumes; a second ServerApp of the same run folder is refused (F25); the SuperLink is killed in
             round 4 and comes back after 20 s (F14)

The states must be those of an undisturbed run in one process.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.federation import Federation
from support.inprocess import crcs, make_session

from server_app.checker import check_run, commits
from umbel.faults import SERVER, FaultPlan

pytestmark = [pytest.mark.fault, pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(900)]

SITES = {"clinic": "demo:clinic", "kitchen": "demo:kitchen"}
SETTINGS = [
    "run.rounds=5",
    "run.seed=7",
    "clients.minimum=2",
    "clients.quorum=2",
    "clients.deadline-seconds=120",
    "clients.grace-seconds=60",
    "train.local-steps=2",
    "train.batch-size=2",
    "train.optimizer-state=keep",
    "train.learning-rate=0.01",
    "train.threads=1",
    "data.max-length=64",
    "data.limit=12",
    "eval.every=0",
    "eval.final=false",
    "telemetry.report=false",
    "telemetry.keep-updates=true",
]
OUTAGE_SECONDS = 20.0


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dict[str, Any]:
    """The folder of the disturbed run and what happened to the runs of Flower."""
    folder: Path = tmp_path_factory.mktemp("server")
    settings = [*SETTINGS, f"run.output-dir={folder / 'run'}"]
    plan = FaultPlan(folder / "fired.jsonl").at(SERVER, round=2, point="in_checkpoint", do="kill")
    with Federation(folder, SITES, isolated=True, env={"UMBEL_FAULTS": plan.to_json()}) as f:
        f.start(*settings)
        deadline = time.monotonic() + 400
        while plan.unfired() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert plan.unfired() == [], f.log("superexec")
        run_id = f.start(*settings, "run.resume=auto")
        f.until(
            lambda e: e["event"] == "round_opened" and e["round"] == 3 and e["t"] > started(f, 2), seconds=400
        )
        second = f.start(*settings, "run.resume=auto")
        f.until(lambda e: e["event"] == "dispatched" and e["round"] == 4, seconds=300)
        f.kill("superlink", signal.SIGKILL)
        time.sleep(OUTAGE_SECONDS)
        f.start_superlink()
        status = f.wait(run_id, seconds=400)
        refused = str(f.facts(second).get("status"))
        if not refused.startswith("finished"):
            refused = f.wait(second, seconds=300)
        log = f.log("superexec")
    return {"folder": folder, "status": status, "refused": refused, "log": log, "events": f.events()}


def started(f: Federation, life: int) -> float:
    """Return when the given life of the server began; infinity before that."""
    times = [e["t"] for e in f.events() if e["event"] == "run_started"]
    return times[life - 1] if len(times) >= life else float("inf")


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> list[str]:
    """The states of the same run without a fault, in one process."""
    folder = tmp_path_factory.mktemp("reference")
    assert make_session(folder, *SETTINGS, sites=tuple(SITES)).run() == 0
    return crcs(folder)


def test_f10_f14_a_killed_server_and_a_superlink_outage_change_no_bit(run, reference) -> None:
    assert run["status"] == "finished:completed"
    assert crcs(run["folder"]) == reference
    assert len(reference) == 5


def test_f10_only_the_open_round_is_run_again(run) -> None:
    starts = [e for e in run["events"] if e["event"] == "run_started"]
    assert [e["resumed_from"] for e in starts] == [None, 1]
    attempts = [(r["round"], r["attempt"]) for r in commits(run["events"])]
    assert attempts[0] == (1, 1)
    assert attempts[1] == (2, 2)
    # Metrics are continuous: one record a round.
    assert [r for r, _ in attempts] == [1, 2, 3, 4, 5]


def test_f25_a_second_server_app_of_one_run_is_refused(run) -> None:
    assert run["refused"] == "finished:failed"
    assert len([e for e in run["events"] if e["event"] == "run_started"]) == 2


def test_the_offline_checker_recomputes_every_state(run) -> None:
    assert check_run(run["folder"] / "run", slack_seconds=OUTAGE_SECONDS + 30) == []
