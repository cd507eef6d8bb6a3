"""FedEx and carry: the exact residual, folded or carried (D02, D14, T10, H31)."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.aggregation.rules import carry, fedex, fedit
from strategies.aggregation.rules.common import Contribution, Factors

OUT, INP, RANK, SCALE = 10, 16, 2, 4.0


def sites(seed, start=None, num=3):
    """Sites that drifted from a common start."""
    rng = np.random.default_rng(seed)
    a, b = (np.zeros((RANK, INP)), np.zeros((OUT, RANK))) if start is None else start
    return [
        Contribution(f"s{i}", w, SCALE, a + rng.normal(size=a.shape), b + rng.normal(size=b.shape))
        for i, w in zip(range(num), (1.0, 2.0, 5.0))
    ]


def ideal(cs):
    return sum(c.weight * c.scale * c.b @ c.a for c in cs) / sum(c.weight for c in cs)


def test_fedex_residual_is_small_in_rank_and_exact():
    cs = sites(0)
    got = fedex.aggregate(cs)
    assert len(got.residual.a) == (len(cs) - 1) * RANK
    direct = ideal(cs) - SCALE * got.factors.b @ got.factors.a
    assert np.abs(got.residual.b @ got.residual.a - direct).max() < 1e-13
    assert np.linalg.norm(direct) > 1.0
    assert got.tail < 1e-14


def test_fedex_truncated_residual_reports_its_tail():
    cs = sites(0)
    full, cut = fedex.aggregate(cs), fedex.aggregate(cs, rank=1)
    exact = full.residual.b @ full.residual.a
    error = np.linalg.norm(cut.residual.b @ cut.residual.a - exact) / np.linalg.norm(exact)
    assert cut.tail == pytest.approx(error, rel=1e-10)
    assert error > 0.1


def test_one_site_has_no_residual_and_its_own_factors_h31():
    cs = sites(0, num=1)
    got = fedex.aggregate(cs)
    assert got.residual.a.shape == (0, INP)
    assert not (got.residual.b @ got.residual.a).any()
    assert got.factors.a.tobytes() == cs[0].a.tobytes()


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_fold_keeps_float32_so_that_small_residuals_survive_many_rounds(fan_in_fan_out):
    import ml_dtypes

    base = np.ones((INP, OUT) if fan_in_fan_out else (OUT, INP), ml_dtypes.bfloat16)
    small = Factors(np.full((1, INP), 1e-3), np.ones((OUT, 1)))
    weight = base
    for _ in range(20):
        weight = fedex.fold(weight, small, fan_in_fan_out)
    assert weight.dtype == np.float32
    assert weight.shape == base.shape
    assert np.allclose(weight, 1.02, atol=1e-5)


def effective(state):
    return SCALE * state.factors.b @ state.factors.a + state.carry.b @ state.carry.a


def test_carry_is_exact_over_three_rounds_and_grows_by_n_minus_one_r():
    """The oracle accumulates every round's residual densely."""
    before, residuals, start = carry.empty(OUT, INP), np.zeros((OUT, INP)), None
    for round_index in range(1, 4):
        cs = sites(round_index, start)
        got = carry.aggregate(cs, before)
        residuals += ideal(cs) - SCALE * got.factors.b @ got.factors.a
        want = SCALE * got.factors.b @ got.factors.a + residuals
        assert np.abs(effective(got) - want).max() < 1e-12
        assert len(got.carry.a) == min(2 * RANK * round_index, OUT)
        assert got.relative_error < 1e-14
        before, start = got.carry, got.factors


def test_carry_cut_to_a_rank_reports_the_dense_error():
    cs = sites(0)
    before = Factors(
        np.random.default_rng(5).normal(size=(3, INP)), np.random.default_rng(6).normal(size=(OUT, 3))
    )
    got = carry.aggregate(cs, before, max_rank=3)
    want = ideal(cs) + before.b @ before.a
    error = np.linalg.norm(effective(got) - want)
    assert len(got.carry.a) == 3
    assert got.relative_error == pytest.approx(error / np.linalg.norm(want), rel=1e-10)
    residual = want - SCALE * got.factors.b @ got.factors.a
    assert got.tail == pytest.approx(error / np.linalg.norm(residual), rel=1e-10)
    assert got.relative_error > 0.01


def test_carry_of_one_site_moves_nothing_but_the_factors_h31():
    before = Factors(np.ones((1, INP)), np.ones((OUT, 1)))
    cs = sites(0, num=1)
    got = carry.aggregate(cs, before)
    assert got.carry is before
    assert got.factors.b.tobytes() == cs[0].b.tobytes()
    cut = carry.aggregate(cs, Factors(np.eye(2, INP), np.eye(OUT, 2)), max_rank=1)
    assert len(cut.carry.a) == 1
    assert cut.tail == pytest.approx(0.5**0.5)


def test_carry_exports_one_plain_adapter():
    got = carry.aggregate(sites(0), carry.empty(OUT, INP))
    adapter = carry.export(got.factors, SCALE, got.carry)
    assert adapter.a.shape == (RANK + 2 * RANK, INP)
    assert np.abs(adapter.b @ adapter.a - effective(got)).max() < 1e-13


def test_mixed_ranks_are_exact_and_every_site_holds_the_same_update_t7():
    """Two rounds: what a site trains plus what it carries is one T at every site, and the mean of T' is exact."""
    rng = np.random.default_rng(0)
    ranks, scales, weights = (
        {"s0": 1, "s1": 2, "s2": 4},
        {"s0": 8.0, "s1": 4.0, "s2": 2.0},
        {"s0": 1, "s1": 2, "s2": 5},
    )
    carries, factors = (
        {},
        {s: Factors(rng.normal(size=(r, INP)), np.zeros((OUT, r))) for s, r in ranks.items()},
    )
    for _ in range(2):
        cs = []
        for site, rank in ranks.items():
            moved = factors[site].b + rng.normal(size=(OUT, rank))
            cs.append(Contribution(site, weights[site], scales[site], factors[site].a, moved))
        want = ideal(cs) + sum(weights[s] / 8 * f.b @ f.a for s, f in carries.items())
        state = carry.aggregate_mixed(cs, carries, max_rank=10)
        for site, rank in ranks.items():
            trained, carried = carry.serve_mixed(state, rank, scales[site])
            assert len(trained.a) == rank
            held = scales[site] * trained.b @ trained.a + carried.b @ carried.a
            assert np.abs(held - want).max() < 1e-11
            factors[site], carries[site] = trained, carried
    cut = carry.aggregate_mixed(cs, {}, max_rank=2)
    error = np.linalg.norm(cut.b @ cut.a - ideal(cs)) / np.linalg.norm(ideal(cs))
    assert cut.relative_error == pytest.approx(error, rel=1e-10)


def test_fedex_and_carry_average_factors_as_fedit_does():
    cs = sites(3)
    want = fedit.aggregate(cs)
    for got in (fedex.aggregate(cs).factors, carry.aggregate(cs, carry.empty(OUT, INP)).factors):
        assert got.a.tobytes() == want.a.tobytes()
        assert got.b.tobytes() == want.b.tobytes()
