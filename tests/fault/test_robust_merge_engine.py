"""Robust merges through the engine: exact on numbers, in the space of products for adapters, refused below the bound."""

from __future__ import annotations

import numpy as np
import pytest
from support.scripted import Script, died, make_bench

from compression import Layout
from server_app.rounds import RunAborted
from strategies import SiteUpdate
from strategies.aggregation.robust.common import combine
from strategies.aggregation.robust.krum import multi_krum
from strategies.fedavg import FedAvg
from strategies.robust_merge import RobustMerge
from umbel.config import resolve
from umbel.errors import ConfigError

pytestmark = pytest.mark.fault

RULES = (
    "coordinate-median",
    "trimmed-mean",
    "krum",
    "multi-krum",
    "geometric-median",
    "centred-clipping",
    "norm-clipping",
)


def bench_of(changes: list[float], rule: str, byzantine: int, *extra: str):
    scripts = [Script(f"s{i}", change, tokens=10) for i, change in enumerate(changes)]
    return make_bench(
        scripts,
        f"clients.merge={rule}",
        f"clients.byzantine={byzantine}",
        f"clients.quorum={len(changes)}",
        "clients.max-norm-ratio=0",
        *extra,
    )


@pytest.mark.parametrize(
    ("rule", "low", "high"),
    [
        ("coordinate-median", 3.0, 3.0),
        ("trimmed-mean", 3.0, 3.0),
        ("krum", 2.0, 4.0),
        ("multi-krum", 2.5, 3.0),
        # The median of a line is the middle point; clipped ones lie within what the honest four allow.
        ("geometric-median", 2.99, 3.01),
        ("centred-clipping", 1.0, 4.0),
        ("norm-clipping", 1.0, 4.0),
    ],
)
def test_one_liar_of_five_moves_the_result_only_so_far(rule, low, high) -> None:
    bench = bench_of([2.0, 3.0, 1.0, 4.0, 1e6], rule, 1)
    record = bench.engine.run_round()
    assert low <= bench.values[0] <= high
    assert bench.values == [bench.values[0]] * 3
    report = record["robust"]
    assert report["rule"] == rule
    assert 0.0 < report["discarded_share"] < 1.0
    assert report["effective"]["s4"] < 0.01


def test_the_mean_would_have_been_ruined() -> None:
    bench = bench_of([2.0, 3.0, 1.0, 4.0, 1e6], "mean", 0)
    bench.engine.run_round()
    assert bench.values[0] > 1e5


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_replies_does_not_enter(rule) -> None:
    changes = [2.0, 3.0, 1.0, 4.0, 50.0]
    results = set()
    for delays in ({}, {"s0": 9.0, "s3": 5.0}):
        scripts = [Script(f"s{i}", c) for i, c in enumerate(changes)]
        bench = make_bench(
            scripts, f"clients.merge={rule}", "clients.byzantine=1", "clients.quorum=5", delays=delays
        )
        bench.engine.run_round()
        results.add(tuple(bench.values))
    assert len(results) == 1


def test_settings_that_could_fall_below_the_bound_are_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"clients.quorum may be as small as 2.*needs 5 updates"):
        resolve(None, ["clients.merge=krum", "clients.byzantine=1", "clients.minimum=3"])
    resolve(None, ["clients.merge=krum", "clients.byzantine=1", "clients.minimum=5", "clients.quorum=5"])
    resolve(None, ["clients.merge=trimmed-mean", "clients.byzantine=1", "clients.minimum=5"])
    with pytest.raises(ConfigError, match="normalise"):
        resolve(None, ["clients.merge=krum", "clients.quorum=3", "clients.normalise=fixed"])


def test_a_round_below_the_bound_is_a_skip_with_the_reason() -> None:
    scripts = [Script(f"s{i}", 1.0) for i in range(5)]
    scripts[0].faults.update({r: died() for r in (1, 2, 3)})
    bench = make_bench(scripts, "clients.merge=krum", "clients.byzantine=1", "clients.quorum=5")
    # The operator of this engine lowered the quorum behind the configuration's back.
    bench.engine._quorum = lambda goal: 3
    with pytest.raises(RunAborted, match="needs at least 5 sites for f = 1"):
        bench.engine.run_round()


def adapters(num: int, rank: int = 2, out: int = 6, width: int = 5, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    names = ("m.lora_A.weight", "m.lora_B.weight")
    shapes = ((rank, width), (out, rank))
    return [
        {n: rng.normal(size=s).astype(np.float32) for n, s in zip(names, shapes, strict=True)}
        for _ in range(num)
    ]


def merged(points: list[dict], state: dict, rule: str, byzantine: int = 0):
    config = resolve(
        None,
        [f"clients.merge={rule}", f"clients.byzantine={byzantine}", "clients.minimum=9", "clients.quorum=9"],
    )
    layout = Layout.from_arrays(state)
    updates = [SiteUpdate(f"s{i}", 1.0, p) for i, p in enumerate(points)]
    return RobustMerge(config, FedAvg(config, layout, {"m": 2.0})).aggregate(state, updates)


def product(arrays: dict) -> np.ndarray:
    return 2.0 * arrays["m.lora_B.weight"].astype(np.float64) @ arrays["m.lora_A.weight"].astype(np.float64)


def regauged(arrays: dict, seed: int) -> dict:
    """The same product in other factors."""
    turn = np.random.default_rng(seed).normal(size=(2, 2)) + 3 * np.eye(2)
    return {
        "m.lora_A.weight": (np.linalg.inv(turn) @ arrays["m.lora_A.weight"]).astype(np.float32),
        "m.lora_B.weight": (arrays["m.lora_B.weight"] @ turn).astype(np.float32),
    }


@pytest.mark.parametrize("rule", RULES)
def test_adapters_are_merged_by_their_products_and_not_by_their_factors(rule) -> None:
    """Each site in another gauge of the same update: the merged product is that of equal gauges."""
    state = adapters(1, seed=5)[0]
    honest = [dict(state) for _ in range(6)]
    for i, point in enumerate(honest):
        point["m.lora_B.weight"] = point["m.lora_B.weight"] + np.float32(0.01 * (i + 1) ** 2)
    plain = merged(honest, state, rule).state
    turned = merged([regauged(p, i) for i, p in enumerate(honest)], state, rule).state
    # Two gauges of one product differ by float32 rounding only.
    assert np.abs(product(plain) - product(turned)).max() < 1e-5 * np.abs(product(plain)).max()
    assert plain["m.lora_A.weight"].shape == (2, 5)


def test_multi_krum_of_adapters_equals_the_rule_on_dense_products() -> None:
    """The oracle: the same rule on the flattened dense updates; the merged product is its best rank-2 approximation."""
    points = adapters(7, seed=1)
    points[3] = {k: v * 30 for k, v in points[3].items()}
    state = adapters(1, seed=9)[0]
    outcome = merged(points, state, "multi-krum", byzantine=2)
    dense = [(product(p) - product(state)).reshape(-1) for p in points]
    want = multi_krum(dense, 2, weights=[1.0] * 7)
    assert outcome.metrics["robust"]["effective"] == pytest.approx(
        {f"s{i}": float(v) for i, v in enumerate(want.effective_weights)}
    )
    target = combine(dense, want.effective_weights).reshape(6, 5) + product(state)
    u, s, vt = np.linalg.svd(target)
    best = (u[:, :2] * s[:2]) @ vt[:2]
    assert np.abs(product(outcome.state) - best).max() < 1e-5
    assert outcome.metrics["robust"]["truncation"] == pytest.approx(
        float(np.linalg.norm(s[2:]) / np.linalg.norm(s)), rel=1e-6
    )


def test_a_merge_to_nothing_keeps_factors_that_can_move_again() -> None:
    state = adapters(1, seed=2)[0]
    zero = {k: np.zeros_like(v) for k, v in state.items()}
    outcome = merged([zero] * 3, state, "coordinate-median")
    assert not product(outcome.state).any()
    assert outcome.state["m.lora_A.weight"].any()
