"""Golden parameter histories: six rounds of scripted changes under every outer rule, every bit of every round.

A change of a rule's arithmetic shows here first. To record the present behaviour as right:

    UMBEL_RERECORD=1 pytest tests/unit/outer/test_outer_history.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from compression import Layout
from strategies import SiteUpdate, build
from strategies.base import Order
from strategies.delayed import Delayed
from strategies.outer.streaming import Fragmented
from strategies.robust_merge import RobustMerge
from umbel.config import resolve
from umbel.exchange import Exchange

GOLDEN = Path(__file__).with_name("golden_histories.json")
ROUNDS, SITES = 6, ("a", "b", "c")
START = {
    "h.0.w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "h.1.w": np.linspace(1, 2, 4, dtype=np.float32),
}
FULL = ("train.mode=full",)
NESTEROV = ("server.optimizer=nesterov", "server.learning-rate=0.7", "server.momentum=0.9")
RULES = {
    "fedavg": (),
    "nesterov": NESTEROV,
    "fedadam": ("server.optimizer=fedadam", "server.learning-rate=0.01"),
    "fedyogi": ("server.optimizer=fedyogi", "server.learning-rate=0.01"),
    "sparseloco": (
        "run.method=sparseloco",
        "server.learning-rate=0.65",
        "compression.up=topk(4096,64)|sign2|rice",
        "compression.feedback=0.95",
    ),
    "delayed": ("run.method=delayed", "clients.mode=async", "server.learning-rate=0.5", "server.delay=4"),
    "rda": (*NESTEROV, "clients.merge=rda", "clients.quorum=1"),
    "median-norm clip": (*NESTEROV, "clients.merge=norm-clipping", "clients.quorum=1"),
    "trimmed mean": (*NESTEROV, "clients.merge=trimmed-mean", "clients.byzantine=1", "clients.quorum=3"),
    "solo whole": (*NESTEROV, "server.solo=whole"),
    "solo damped": (*NESTEROV, "server.solo=damped"),
    "streaming": (),
}


def updates_of(state, r, sites=SITES):
    rng = np.random.default_rng(r)
    return [
        SiteUpdate(
            s,
            1.0 + i,
            {n: v + (0.1 * rng.normal(size=v.shape)).astype(np.float32) for n, v in state.items()},
            tokens=10 * (i + 1),
            steps=5,
        )
        for i, s in enumerate(sites)
    ]


def streaming():
    server = Fragmented(START, [["h.0.w"], ["h.1.w"]], 0.7, 0.9)
    for r in range(ROUNDS):
        names = server.parts[r % 2]
        rows = [u.arrays for u in updates_of(server.state, r)]
        server.merge(r % 2, {n: np.mean([row[n] for row in rows], axis=0, dtype=np.float32) for n in names})
        yield server.state


def history(rule):
    """Yield the state after each round."""
    if rule == "streaming":
        yield from streaming()
        return
    config = resolve(None, [*FULL, *RULES[rule]])
    layout = Layout.from_arrays(START)
    strategy = build(config, layout, {})
    order = Order(Exchange(), START, START, layout, layout, {})
    strategy.given = dict.fromkeys(SITES, order)
    merge = RobustMerge(config, strategy) if config.clients.merge != "mean" else strategy
    state = START
    for r in range(ROUNDS):
        # "solo": one site of three delivers in odd rounds.
        sites = SITES[:1] if (rule.startswith("solo") and r % 2) or isinstance(strategy, Delayed) else SITES
        if isinstance(strategy, Delayed):
            strategy.ages = {"a": r % 3}
        state = merge.aggregate(state, updates_of(state, r, sites)).state
        yield state


def as_hex(state):
    return {name: [float(x).hex() for x in value.reshape(-1)] for name, value in sorted(state.items())}


@pytest.mark.parametrize("rule", RULES)
def test_history_is_the_recorded_one(rule):
    found = [as_hex(state) for state in history(rule)]
    known = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {}
    if os.environ.get("UMBEL_RERECORD") == "1":
        known[rule] = found
        GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")
    assert found == known[rule]


def test_rules_differ_from_one_another():
    """A golden file of rules that silently fell back to the mean would be no evidence."""
    known = json.loads(GOLDEN.read_text("utf-8"))
    last = {json.dumps(rounds[-1], sort_keys=True) for rounds in known.values()}
    assert set(known) == set(RULES)
    assert len(last) == len(RULES)


def test_a_solo_round_is_the_sites_values_and_leaves_the_momentum():
    """eta .7, mu .9 (section 2.3): whole takes delta; damped from rest takes .7 * 1.9 delta and starts momentum."""
    found = {}
    for choice in ("whole", "damped"):
        config = resolve(None, [*FULL, *NESTEROV, f"server.solo={choice}"])
        layout = Layout.from_arrays(START)
        strategy = build(config, layout, {})
        strategy.given = dict.fromkeys(SITES, Order(Exchange(), START, START, layout, layout, {}))
        values = {n: v + np.float32(0.5) for n, v in START.items()}
        state = strategy.aggregate(START, [SiteUpdate("a", 3.0, values)]).state
        found[choice] = float((state["h.1.w"] - START["h.1.w"])[0]), bool(strategy.state_dict())
    assert found["whole"] == (0.5, False)
    assert found["damped"] == (pytest.approx(0.5 * 0.7 * 1.9, abs=1e-6), True)


def test_a_run_of_one_site_keeps_its_outer_step():
    config = resolve(None, [*FULL, *NESTEROV])
    layout = Layout.from_arrays(START)
    strategy = build(config, layout, {})
    strategy.given = {"a": Order(Exchange(), START, START, layout, layout, {})}
    values = {n: v + np.float32(0.5) for n, v in START.items()}
    state = strategy.aggregate(START, [SiteUpdate("a", 3.0, values)]).state
    assert float((state["h.1.w"] - START["h.1.w"])[0]) == pytest.approx(0.665, abs=1e-6)
