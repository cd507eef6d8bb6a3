"""A small run of two sites, event by event, with numbers that can be added by hand."""

from __future__ import annotations

from typing import Any

import pytest


def accepted(round_index: int, site: str, tokens: int, loss: float, **more: Any) -> dict[str, Any]:
    seconds = {"load": 0.75, "prepare": 0.25, "train": 10.0, "encode": 0.5, "eval": 2.5}
    return {
        "event": "update_accepted",
        "round": round_index,
        "site": site,
        "weight": tokens,
        "tokens": tokens,
        "loss": loss,
        "bytes": 1000,
        "seconds": seconds,
        "late": False,
        "peak_memory_bytes": 5_000_000,
    } | more


def committed(round_index: int, sites: list[str], *, outcome: str = "commit", **more: Any) -> dict[str, Any]:
    return {
        "event": "round_committed",
        "round": round_index,
        "attempt": 1,
        "outcome": outcome,
        "accepted": [{"site": s, "weight": 1, "norm": 0.5, "crc": "aa", "late": False} for s in sites],
        "rejected": [],
        "missing": [],
        "bytes_up": 1000 * len(sites),
        "bytes_down": 4000,
        "seconds": {"total": 20.0},
        "state_crc": f"crc{round_index}",
    } | more


def opened(round_index: int, sites: list[str], attempt: int = 1) -> dict[str, Any]:
    return {"event": "round_opened", "round": round_index, "attempt": attempt, "selected": sites}


@pytest.fixture
def two_site_run() -> list[dict[str, Any]]:
    """Round 1 commits both, round 2 is skipped, round 3 commits `north` alone while `south` runs out of memory."""
    both = ["north", "south"]
    held = {"loss": 4.0, "token_accuracy": 0.25, "sites": {"north": {"loss": 3.0}, "south": {"loss": 5.0}}}
    after = {"loss": 3.0, "sites": {"north": {"loss": 2.5}, "south": {"loss": 3.5}}}
    events = [
        {"event": "run_started", "run": "r", "method": "fedit", "model": "m", "task": "sft", "rounds": 3},
        {"event": "site_joined", "site": "north", "rows_train": 30, "versions": {"torch": "2.13.0"}},
        {"event": "site_joined", "site": "south", "rows_train": 70, "versions": {"torch": "2.12.0"}},
        {"event": "site_refused", "site": "west", "reason": "tokenizer differs"},
        {"event": "sample", "when": "before", "prompt": "Why?", "answer": "no idea"},
        opened(1, both),
        {"event": "dispatched", "round": 1, "site": "north", "bytes": 2000},
        {"event": "dispatched", "round": 1, "site": "south", "bytes": 2000},
        accepted(1, "north", 300, 4.0),
        accepted(1, "south", 100, 6.0),
        committed(
            1, both, train_loss=4.5, heldout=held, exactness={"relative_error": 2e-8, "worst_layer": "l1"}
        ),
        opened(2, both),
        accepted(2, "north", 300, 3.5),
        committed(2, ["north"], outcome="skip", train_loss=3.5, missing=["south"], heldout=after),
        opened(3, both),
        accepted(3, "north", 200, 3.0),
        {"event": "site_failed", "round": 3, "site": "south", "kind": "oom", "reason": "out of memory"},
        committed(
            3,
            ["north"],
            train_loss=3.0,
            heldout=after,
            exactness={"relative_error": 5e-8, "worst_layer": "l2"},
        ),
        {"event": "evaluated", "round": 3, "where": "sites", "loss": 2.0, "sites": {"north": {"loss": 2.0}}},
        {"event": "evaluated", "round": 3, "where": "server", "loss": 2.2},
        {"event": "sample", "when": "after", "prompt": "Why?", "answer": "because"},
        {"event": "run_finished", "outcome": "completed", "reason": "", "rounds": 3, "exit_code": 0},
    ]
    return [{"t": 1000.0 + 10 * i} | e for i, e in enumerate(events)]


@pytest.fixture
def failed_run() -> list[dict[str, Any]]:
    """H29: every site raises, nothing is ever committed."""
    events = [
        {"event": "run_started", "run": "bad", "method": "fedit", "model": "m", "rounds": 5},
        opened(1, ["north", "south"]),
        {
            "event": "site_failed",
            "round": 1,
            "site": "north",
            "kind": "exception",
            "reason": "ImportError: peft",
        },
        {
            "event": "site_failed",
            "round": 1,
            "site": "south",
            "kind": "exception",
            "reason": "ImportError: peft",
        },
        committed(1, [], outcome="abort"),
        {
            "event": "run_finished",
            "outcome": "failed",
            "reason": "0 of 2 replies",
            "rounds": 0,
            "exit_code": 75,
        },
    ]
    return [{"t": 1000.0 + i} | e for i, e in enumerate(events)]
