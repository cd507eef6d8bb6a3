"""Sites that come, go and come back, with real processes: one federation, one run.

round 1   cat's SuperNode starts when the round commits (F16)
then      cat is killed as soon as its first full state has been sent to it (F16)
then      bee's SuperNode ends in the same round and stays away for three of them (F17)
later     bee is started again; the run is ended once an update of it counts
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.federation import Federation

from server_app.checker import check_run, commits

pytestmark = [pytest.mark.fault, pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(600)]

SITES = {"ant": "demo:clinic", "bee": "demo:kitchen", "cat": "demo:workshop"}
SETTINGS = [
    "run.rounds=60",
    "run.seed=7",
    "clients.minimum=2",
    "clients.quorum=1",
    # What the two rounds cost in which a site is asked that will never answer.
    "clients.deadline-seconds=40",
    "clients.min-deadline-seconds=10",
    "clients.grace-seconds=4",
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
AWAY = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dict[str, Any]:
    """The folder and the events of the whole story."""
    folder: Path = tmp_path_factory.mktemp("joins")
    with Federation(folder, {"ant": SITES["ant"], "bee": SITES["bee"]}) as f:
        f.sites = SITES
        run_id = f.start(*SETTINGS, f"run.output-dir={folder / 'run'}")
        f.until(lambda e: e["event"] == "round_committed" and e["round"] == 1, seconds=300)
        f.start_site("cat")
        sent = f.until(lambda e: e["event"] == "dispatched" and e["site"] == "cat", seconds=120)
        f.kill("cat", signal.SIGKILL)
        left = f.until(
            lambda e: e["event"] == "dispatched" and e["site"] == "bee" and e["round"] >= sent["round"],
            seconds=120,
        )
        # A node that is asked to end says so, and is not waited for.
        f.kill("bee", signal.SIGTERM)
        f.until(
            lambda e: e["event"] == "round_committed" and e["round"] >= left["round"] + AWAY - 1, seconds=200
        )
        f.start_site("bee")
        f.until(
            lambda e: e["event"] == "update_accepted" and e["site"] == "bee" and e["round"] > left["round"],
            seconds=200,
        )
        back = f.events()[-1]
        f.until(lambda e: e["event"] == "round_committed" and e["t"] >= back["t"], seconds=120)
        f.stop(run_id)
        f.until(lambda e: e["event"] == "run_finished", seconds=60)
        return {"folder": folder / "run", "events": f.events(), "sent": sent, "left": left}


def of(run: dict[str, Any], kind: str, site: str) -> list[dict[str, Any]]:
    return [e for e in run["events"] if e["event"] == kind and e.get("site") == site]


def test_f16_a_node_that_joins_in_mid_run_is_asked_within_two_rounds(run) -> None:
    """F16: with the full state of that moment; nobody else waits for it."""
    joined = of(run, "site_joined", "cat")[0]
    opened = [e for e in run["events"] if e["event"] == "round_opened" and e["t"] >= joined["t"]]
    assert "cat" in {name for e in opened[:2] for name in e["selected"]}
    first = commits(run["events"])[0]
    assert "cat" not in {a["site"] for a in first["accepted"]}


def test_f16_a_node_that_leaves_while_its_state_is_on_the_way_costs_nobody_anything(run) -> None:
    index = run["sent"]["round"]
    record = next(r for r in commits(run["events"]) if r["round"] == index)
    assert "ant" in [a["site"] for a in record["accepted"]]
    assert "cat" not in [a["site"] for a in record["accepted"]]
    assert record["seconds"]["total"] <= 45


def test_f17_a_site_that_missed_rounds_goes_on_from_its_own_last_update(run) -> None:
    """F17: it contributes again, from its own state, and no round of its absence holds its update."""
    left = run["left"]["round"]
    again = [e for e in of(run, "update_accepted", "bee") if e["round"] > left]
    first = again[0]["round"]
    assert first >= left + AWAY
    assert again[0]["state_found"] is True
    absent = [r for r in commits(run["events"]) if left < r["round"] < first]
    assert len(absent) >= AWAY - 1
    assert all("bee" not in [a["site"] for a in r["accepted"]] for r in absent)
    assert len(of(run, "site_joined", "bee")) == 2


def test_f16_f17_every_state_follows_from_its_updates(run) -> None:
    assert check_run(run["folder"]) == []
