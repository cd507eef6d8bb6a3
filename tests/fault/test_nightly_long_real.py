"""The slow rows of the fault table, with real processes: `make chaos`, or UMBEL_NIGHTLY=1 pytest on this file.

F20 and F21 are waits longer than any liveness limit of Flower's, S2 to S4 are loads. The chaos run itself (S1) is
`python -m benchmarks.chaos`.
"""

from __future__ import annotations

import signal
import time

import psutil
import pytest
from support.federation import Federation

from server_app.checker import check_run, commits
from umbel.faults import SERVER, FaultPlan

pytestmark = [pytest.mark.fault, pytest.mark.federation, pytest.mark.nightly, pytest.mark.timeout(5400)]

SITES = {"clinic": "demo:clinic", "kitchen": "demo:kitchen"}
SETTINGS = [
    "run.seed=7",
    "clients.minimum=2",
    "clients.quorum=2",
    "clients.deadline-seconds=90",
    "clients.grace-seconds=60",
    "train.local-steps=2",
    "train.batch-size=2",
    "train.optimizer-state=keep",
    "train.threads=1",
    "data.max-length=64",
    "data.limit=12",
    "eval.every=0",
    "eval.final=false",
    "telemetry.report=false",
    "telemetry.keep-updates=true",
]


def test_f20_a_server_that_works_for_five_minutes_loses_no_node(tmp_path) -> None:
    """F20: the server evaluates (here: sleeps) 5 min between two rounds; the same sites go on, exactly."""
    plan = FaultPlan(tmp_path / "fired.jsonl")
    plan.at(SERVER, round=2, point="after_commit", do="delay", seconds=300.0)
    with Federation(tmp_path, SITES, env={"UMBEL_FAULTS": plan.to_json()}) as f:
        run_id = f.start(*SETTINGS, "run.rounds=3", f"run.output-dir={tmp_path / 'run'}")
        assert f.wait(run_id, seconds=700) == "finished:completed"
        events = f.events()
    assert plan.unfired() == []
    assert len([e for e in events if e["event"] == "site_joined"]) == 2
    assert [len(r["accepted"]) for r in commits(events)] == [2, 2, 2]
    assert check_run(tmp_path / "run", slack_seconds=330.0) == []


def test_f21_a_site_that_says_nothing_for_a_quarter_of_an_hour_is_not_declared_dead(tmp_path) -> None:
    """F21: it trains (here: sleeps) 15 min within the deadline; its update counts in its own round."""
    plan = FaultPlan(tmp_path / "fired.jsonl")
    plan.at("kitchen", round=2, point="before_train", do="delay", seconds=900.0)
    with Federation(tmp_path, SITES, env={"UMBEL_FAULTS": plan.to_json()}) as f:
        long = ["clients.deadline-seconds=1500", "clients.grace-seconds=1200"]
        run_id = f.start(*SETTINGS, *long, "run.rounds=3", f"run.output-dir={tmp_path / 'run'}")
        assert f.wait(run_id, seconds=1800) == "finished:completed"
        events = f.events()
    assert plan.unfired() == []
    second = commits(events)[1]
    assert [a["site"] for a in second["accepted"]] == ["clinic", "kitchen"]
    assert second["seconds"]["total"] >= 900
    assert not [e for e in events if e["event"] in ("site_failed", "site_silent", "update_rejected")]


def test_s2_sixteen_nodes_on_this_machine_lose_no_message(tmp_path) -> None:
    """S2: three rounds of sixteen SuperNodes; every update of every round arrives."""
    names = {f"site-{i:02d}": "demo:clinic" for i in range(16)}
    with Federation(tmp_path, names) as f:
        many = [
            "clients.minimum=16",
            "clients.quorum=16",
            "clients.over-provision=1.0",
            "clients.deadline-seconds=900",
            "clients.grace-seconds=900",
            "clients.start-timeout-seconds=900",
        ]
        run_id = f.start(*SETTINGS, *many, "run.rounds=3", f"run.output-dir={tmp_path / 'run'}")
        assert f.wait(run_id, seconds=3000) == "finished:completed"
        events = f.events()
    assert [len(r["accepted"]) for r in commits(events)] == [16] * 3
    assert not [e for e in events if e["event"] in ("site_failed", "site_silent", "update_rejected")]
    assert check_run(tmp_path / "run") == []


def server_process(f: Federation) -> psutil.Process:
    """Return the process that runs the ServerApp."""
    children = psutil.Process(f.processes["superlink"].pid).children(recursive=True)
    return next(p for p in children if "serverapp" in " ".join(p.cmdline()))


def test_s3_five_hundred_rounds_with_late_updates_grow_nothing(tmp_path) -> None:
    """S3: one site is late in every fifth round; memory and file handles of the server stay flat, no zombies."""
    rounds = 500
    plan = FaultPlan(tmp_path / "fired.jsonl")
    for index in range(5, rounds, 5):
        plan.at("kitchen", round=index, point="before_send", do="delay", seconds=4.0)
    samples: list[tuple[int, int, int]] = []
    with Federation(tmp_path, SITES, env={"UMBEL_FAULTS": plan.to_json()}) as f:
        short = ["clients.quorum=1", "clients.grace-seconds=2", "telemetry.keep-updates=false"]
        run_id = f.start(*SETTINGS, *short, f"run.rounds={rounds}", f"run.output-dir={tmp_path / 'run'}")
        f.until(lambda e: e["event"] == "round_committed" and e["round"] == 50, seconds=1200)
        process, committed = server_process(f), 50
        while committed < rounds - 5:
            samples.append((committed, process.memory_info().rss, process.num_fds()))
            time.sleep(20.0)
            committed = len(commits(f.events()))
            zombies = [
                p for p in process.parent().children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE
            ]
            assert len(zombies) <= 2
        assert f.wait(run_id, seconds=600) == "finished:completed"
    (first, low, handles), (last, high, handles_after) = samples[0], samples[-1]
    assert (high - low) / (last - first) <= 2**20
    assert handles_after <= handles + 8


def test_s4_the_superlink_is_restarted_every_minute(tmp_path) -> None:
    """S4: killed and started again for 20 min; the run completes, each state follows from its accepted set."""
    rounds, minutes = 60, 20
    with Federation(tmp_path, SITES, isolated=True) as f:
        run_id = f.start(*SETTINGS, f"run.rounds={rounds}", f"run.output-dir={tmp_path / 'run'}")
        f.until(lambda e: e["event"] == "round_committed" and e["round"] == 1, seconds=300)
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and len(commits(f.events())) < rounds - 1:
            f.kill("superlink", signal.SIGKILL)
            time.sleep(3.0)
            f.start_superlink()
            time.sleep(57.0)
        assert f.wait(run_id, seconds=1800) == "finished:completed"
    assert len(commits(f.events())) == rounds
    assert check_run(tmp_path / "run", slack_seconds=90.0) == []
