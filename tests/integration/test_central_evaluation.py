"""Held-out rows on the server, and one prompt answered before and after: through the real session, in process."""

from __future__ import annotations

import json

import pytest
from support.fakegrid import FakeGrid, FakeSite, VirtualClock, app_site

from server_app.run import Session
from umbel.config import resolve
from umbel.telemetry.events import read_events


@pytest.fixture(scope="module")
def events(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("central")
    rows = folder / "held.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"question": f"Topic {i}?", "answer": f"Topic: {i}. Signed: desk."}) + "\n"
            for i in range(20)
        )
    )
    config = resolve(
        None,
        [
            f"run.output-dir={folder / 'run'}",
            "run.rounds=2",
            "clients.minimum=2",
            "train.local-steps=4",
            "train.learning-rate=0.01",
            "train.threads=1",
            "data.max-length=96",
            "data.limit=60",
            "eval.every=1",
            f"eval.central-data={rows}",
            "eval.sample-prompt=Topic 3?",
            "eval.sample-tokens=4",
            "telemetry.report=false",
        ],
    )
    clock = VirtualClock()
    grid = FakeGrid(clock)
    for i in range(2):
        node = {"partition-id": i, "num-partitions": 2, "state-dir": str(folder / "state")}
        grid.sites[i + 1] = FakeSite(app_site(i + 1, node))
    assert Session(config, grid, simulated=True, now=clock.now, sleep=clock.sleep).run() == 0
    return read_events(folder / "run" / "events.jsonl")


def test_the_server_scores_the_first_state_and_each_round(events) -> None:
    scored = [e for e in events if e["event"] == "evaluated" and e["where"] == "server"]
    assert [e["round"] for e in scored] == [0, 1, 2]
    assert scored[-1]["loss"] < scored[0]["loss"]
    assert len({e["tokens"] for e in scored}) == 1
    assert scored[0]["perplexity"] > scored[-1]["perplexity"]


def test_a_prompt_is_answered_before_and_after(events) -> None:
    samples = [e for e in events if e["event"] == "sample"]
    assert [(e["when"], e["prompt"]) for e in samples] == [("before", "Topic 3?"), ("after", "Topic 3?")]


def test_sites_report_held_out_sums_of_the_state_they_started_from(events) -> None:
    committed = [e for e in events if e["event"] == "round_committed"]
    assert [len(e["heldout"]["sites"]) for e in committed] == [2, 2]
    final = next(e for e in events if e["event"] == "evaluated" and e["where"] == "sites")
    assert final["loss"] < committed[0]["heldout"]["loss"]
    assert final["tokens"] == committed[0]["heldout"]["tokens"]
