"""Properties of the exact rules over random layers, ranks, scales and weights (T1, T2, T4, T7)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.aggregation.rules import (
    carry,
    fedask,
    fedex,
    fedplora,
    fedsb,
    flexlora,
    flora,
    hetlora,
    raflora,
)
from strategies.aggregation.rules.common import Contribution, Factors


@st.composite
def cohorts(draw, equal=False):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out, inp = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    num, rank, scale = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([0.5, 1.0, 4.0])),
    )
    cs = []
    for i in range(num):
        r = rank if equal else draw(st.integers(1, 4))
        s = scale if equal else draw(st.sampled_from([0.25, 1.0, 8.0]))
        weight = draw(st.integers(0 if i else 1, 100))
        cs.append(Contribution(f"s{i}", weight, s, rng.normal(size=(r, inp)), rng.normal(size=(out, r))))
    return cs


def ideal(cs):
    total = sum(c.weight for c in cs)
    return sum(c.weight / total * c.scale * c.b @ c.a for c in cs)


@settings(max_examples=60, deadline=None)
@given(cohorts())
def test_rules_for_mixed_ranks_serve_the_ideal(cs):
    want = ideal(cs)
    out, inp = want.shape
    total = sum(len(c.a) for c in cs)
    stacked = flora.aggregate(cs)
    target = flexlora.Target(total, 2.0)
    flex = flexlora.aggregate(cs, [target])[target].factors
    asked = fedask.aggregate(cs, fedask.probe(0, 1, "q", inp, total))
    mixed = carry.aggregate_mixed(cs, {}, max_rank=total)
    for got in (stacked.b @ stacked.a, 2.0 * flex.b @ flex.a, asked.b @ asked.a, mixed.b @ mixed.a):
        assert got.shape == (out, inp)
        assert np.allclose(got, want, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(cohorts(equal=True), st.integers(0, 3))
def test_residual_rules_serve_the_ideal_and_agree(cs, carried_rank):
    want, scale = ideal(cs), cs[0].scale
    folded = fedex.aggregate(cs)
    assert np.allclose(
        scale * folded.factors.b @ folded.factors.a + folded.residual.b @ folded.residual.a, want
    )
    rng = np.random.default_rng(0)
    before = Factors(
        rng.normal(size=(carried_rank, want.shape[1])), rng.normal(size=(want.shape[0], carried_rank))
    )
    kept = carry.aggregate(cs, before)
    adapter = carry.export(kept.factors, scale, kept.carry)
    assert np.allclose(adapter.b @ adapter.a, want + before.b @ before.a)
    assert kept.relative_error < 1e-10


@settings(max_examples=40, deadline=None)
@given(cohorts(equal=True), st.randoms(use_true_random=False))
def test_order_of_sites_never_changes_a_bit(cs, random):
    shuffled = list(cs)
    random.shuffle(shuffled)
    target = flexlora.Target(2, 1.0)
    for rule in (
        lambda x: flora.aggregate(x),
        lambda x: fedex.aggregate(x).residual,
        lambda x: flexlora.aggregate(x, [target])[target].factors,
        lambda x: raflora.aggregate(x, [target])[target].factors,
        lambda x: hetlora.aggregate(x, 4).factors,
    ):
        first, second = rule(cs), rule(shuffled)
        assert first.a.tobytes() == second.a.tobytes()
        assert first.b.tobytes() == second.b.tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4))
def test_nested_cores_and_modules_stay_within_what_was_sent(seed, num_sites, rank):
    """An entry is a convex combination of the values of the sites that have it, or the server's own bits."""
    rng = np.random.default_rng(seed)
    previous = rng.normal(size=(rank, rank))
    sent = [(f"s{i}", float(rng.integers(1, 9)), rng.normal(size=(r, r)))
            for i, r in enumerate(rng.integers(1, rank + 1, size=num_sites))]  # fmt: skip
    got = fedsb.aggregate(previous, sent)
    for i in range(rank):
        for j in range(rank):
            values = [m[i, j] for _, _, m in sent if max(i, j) < len(m)] or [previous[i, j]]
            assert min(values) - 1e-12 <= got[i, j] <= max(values) + 1e-12


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 30), st.integers(1, 30), st.integers(1, 5))
def test_a_selection_is_a_set_of_modules_that_exist(num_modules, num_trained, position, round_index, cohort):
    num_trained = min(num_trained, num_modules)
    chosen = fedplora.select(num_modules, num_trained, position, round_index, cohort)
    assert len(set(chosen)) == num_trained
    assert set(chosen) <= set(range(num_modules))
