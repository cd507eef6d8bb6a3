"""FLoRA, FlexLoRA, HetLoRA, raFLoRA and FedASK: rules for mixed ranks (T3, T7, T17, D07, D08)."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.rules import fedask, flexlora, flora, hetlora, raflora
from strategies.aggregation.rules.common import Contribution, Factors
from strategies.aggregation.rules.flexlora import Target


def sites(ranks=(2, 4, 8), weights=(1, 2, 5), scales=(2.0, 1.0, 0.5), seed=0, out=18, inp=11):
    rng = np.random.default_rng(seed)
    return [
        Contribution(f"s{i}", w, s, rng.normal(size=(r, inp)), rng.normal(size=(out, r)))
        for i, (r, w, s) in enumerate(zip(ranks, weights, scales))
    ]


def ideal(cs):
    return sum(c.weight * c.scale * c.b @ c.a for c in cs) / sum(c.weight for c in cs)


def truncated(matrix, rank):
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank], np.linalg.norm(s[rank:]) / np.linalg.norm(s)


def test_flora_rank_is_the_sum_and_scale_is_one_d07():
    cs = sites()
    got = flora.aggregate(cs)
    assert (got.a.shape, got.b.shape) == ((14, 11), (18, 14))
    base = np.random.default_rng(1).normal(size=(18, 11)).astype(np.float32)
    assert np.abs(flora.merge(base, got) - (base + ideal(cs))).max() < 1e-6
    assert np.abs(flora.merge(base.T, got, fan_in_fan_out=True) - (base + ideal(cs)).T).max() < 1e-6
    assert flora.merge(base, got).dtype == np.float32


def test_flexlora_serves_the_truncated_dense_svd_at_every_rank_t3_d08():
    cs = sites()
    targets = [Target(2, 2.0), Target(4, 1.0), Target(8, 0.5)]
    for target, served in flexlora.aggregate(cs, targets).items():
        best, tail = truncated(ideal(cs), target.rank)
        b, a = served.factors.b, served.factors.a
        assert np.abs(target.scale * b @ a - best).max() < 1e-12
        assert served.tail == pytest.approx(tail, abs=1e-12)
        error = np.linalg.norm(target.scale * b @ a - ideal(cs)) / np.linalg.norm(ideal(cs))
        assert served.tail == pytest.approx(error, abs=1e-12)
        assert np.allclose(b.T @ b, a @ a.T, atol=1e-12)  # balanced, the scale split over both


def test_flexlora_alignment_keeps_the_product_and_stops_the_basis_from_jumping():
    first = flexlora.aggregate(sites(), [Target(4, 1.0)])[Target(4, 1.0)].factors
    flipped = [c._replace(a=c.a + 1e-3, b=-c.b) for c in sites()]
    flipped = [c._replace(a=-c.a) for c in flipped]
    loose = flexlora.aggregate(flipped, [Target(4, 1.0)])[Target(4, 1.0)].factors
    held = flexlora.aggregate(flipped, [Target(4, 1.0)], previous_b=-first.b)[Target(4, 1.0)].factors
    assert np.abs(held.b @ held.a - loose.b @ loose.a).max() < 1e-12
    assert np.linalg.norm(held.b + first.b) < 0.1 * np.linalg.norm(first.b)
    assert np.linalg.norm(loose.b + first.b) > np.linalg.norm(first.b)


def test_hetlora_padded_mean_by_hand_t7():
    """Ranks 1, 2, 4 with p = 1/2, 1/4, 1/4; every entry of site i is i. Rows have 3, 2, 1, 1 owners."""
    cs = [
        Contribution(f"s{r}", w, 2.0, np.full((r, 2), float(r)), np.full((3, r), float(r)))
        for r, w in ((1, 2), (2, 1), (4, 1))
    ]
    plain = hetlora.aggregate(cs, 4, per_row=False)
    assert plain.factors.a[:, 0].tolist() == [2.0, 1.5, 1.0, 1.0]
    assert plain.factors.b[0].tolist() == [4.0, 3.0, 2.0, 2.0]
    rows = hetlora.aggregate(cs, 5)
    assert rows.factors.a[:, 0].tolist() == [2.0, 3.0, 4.0, 4.0, 0.0]
    assert rows.factors.b[0].tolist() == [4.0, 6.0, 8.0, 8.0, 0.0]
    assert rows.coverage.tolist() == [1.0, 0.5, 0.25, 0.25, 0.0]
    served = hetlora.truncate(rows.factors, 2, 4.0)
    assert (served.a.tolist(), served.b[0].tolist()) == ([[2.0, 2.0], [3.0, 3.0]], [1.0, 1.5])


def test_hetlora_weights_and_pruning_measure():
    cs = sites()
    norms = {c.site: np.linalg.norm(c.scale * c.b @ c.a) for c in cs}
    got = hetlora.sparsity_weights(cs)
    assert got == pytest.approx({s: n / sum(norms.values()) for s, n in norms.items()})
    c = cs[2]
    assert hetlora.tail_product(Factors(c.a, c.b), 6) == pytest.approx(
        np.linalg.norm(c.b[:, 6:]) * np.linalg.norm(c.a[6:])
    )
    ordered = hetlora.order_directions(Factors(c.a, c.b))
    assert np.abs(ordered.b @ ordered.a - c.b @ c.a).max() < 1e-12
    assert (np.diff(np.linalg.norm(ordered.a, axis=1)) <= 1e-12).all()


def test_raflora_target_by_hand():
    cs = sites()
    p = np.array([1, 2, 5]) / 8
    blocks = [(slice(0, 2), (0, 1, 2)), (slice(2, 4), (1, 2)), (slice(4, 8), (2,))]
    want = sum(
        p[i] / sum(p[j] for j in members) * cs[i].scale * cs[i].b[:, part] @ cs[i].a[part]
        for part, members in blocks
        for i in members
    )
    got = raflora.aggregate(cs, [Target(8, 2.0), Target(2, 0.5)])
    full, small = got[Target(8, 2.0)].factors, got[Target(2, 0.5)].factors
    assert np.abs(2.0 * full.b @ full.a - truncated(want, 8)[0]).max() < 1e-12
    assert np.abs(0.5 * small.b @ small.a - truncated(want, 2)[0]).max() < 1e-12
    assert got[Target(8, 2.0)].tail == pytest.approx(truncated(want, 8)[1], abs=1e-12)


def test_raflora_at_equal_ranks_is_flexlora():
    cs, target = sites(ranks=(3, 3, 3)), Target(3, 2.0)
    mine, theirs = raflora.aggregate(cs, [target])[target], flexlora.aggregate(cs, [target])[target]
    assert np.abs(mine.factors.b - theirs.factors.b).max() < 1e-12
    assert mine.tail == pytest.approx(theirs.tail)


def _collapse(rule, rounds=30, ranks=(2, 4, 8, 16, 32), size=40):
    """Sites of mixed rank pull halfway to one common target each round, within their rank; all serve by `rule`.

    Returns (share of energy in the top two directions of what the largest site is served, true share, error).
    """
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(size, 32)))[0] for _ in range(2))
    sigma = np.linspace(1.2, 0.8, 32)
    target = (u * sigma) @ v.T
    served = dict.fromkeys(ranks, np.zeros((size, size)))
    for _ in range(rounds):
        cs = []
        for rank in ranks:
            own = served[rank] + 0.5 * (target - served[rank])
            left, s, right = np.linalg.svd(own, full_matrices=False)
            root = np.sqrt(s[:rank])
            cs.append(
                Contribution(f"{rank:02}", 1.0, 1.0, root[:, None] * right[:rank], left[:, :rank] * root)
            )
        got = rule(cs, [Target(rank, 1.0) for rank in ranks])
        served = {t.rank: r.factors.b @ r.factors.a for t, r in got.items()}
    energy = np.linalg.svd(served[32], compute_uv=False) ** 2
    error = np.linalg.norm(served[32] - target) / np.linalg.norm(target)
    return energy[:2].sum() / energy.sum(), (sigma[:2] ** 2).sum() / (sigma**2).sum(), error


def test_rank_collapse_over_thirty_rounds_t17():
    share, true, error = _collapse(raflora.aggregate)
    plain_share, _, plain_error = _collapse(flexlora.aggregate)
    assert share < 1.5 * true
    assert plain_share > 2 * true  # what plain averaging does: reported, not promised
    assert error < plain_error


@pytest.mark.parametrize("stayed", [("s0", "s1", "s2"), ("s0", "s2"), ("s1",)])
def test_fedask_is_the_exact_ideal_of_the_survivors(stayed):
    cs, omega = sites(inp=15), fedask.probe(7, 2, "q", 15, 14)
    got = fedask.aggregate(cs, omega, survivors=stayed)
    want = ideal([c for c in cs if c.site in stayed])
    assert np.linalg.norm(got.b @ got.a - want) / np.linalg.norm(want) < 1e-12


def test_fedask_survivors_need_ranks_that_fit_the_layer():
    """14 directions in a layer of 11 inputs: Q spans the first sum, not each site, and the promise ends."""
    cs, omega = sites(), fedask.probe(7, 2, "q", 11, 14)
    whole, part = fedask.aggregate(cs, omega), fedask.aggregate(cs, omega, survivors=["s0", "s2"])
    assert np.abs(whole.b @ whole.a - ideal(cs)).max() < 1e-12
    assert np.abs(part.b @ part.a - ideal([cs[0], cs[2]])).max() > 0.1


def test_fedask_refuses_a_site_that_joins_at_stage_two_and_it_would_matter():
    cs, omega = sites(ranks=(2, 2, 2)), fedask.probe(7, 2, "q", 11, 4)
    with pytest.raises(UpdateError, match="s2"):
        fedask.aggregate(cs[:2], omega, survivors=["s0", "s2"])
    q = fedask.basis(fedask.sums.add(fedask.first_summand(c, omega) for c in cs[:2]))
    forced = fedask.from_total(fedask.sums.add(fedask.second_summand(c, q) for c in cs), q)
    want = ideal(cs)
    assert np.linalg.norm(forced.b @ forced.a - want) / np.linalg.norm(want) > 0.1


def test_fedask_with_a_small_probe_is_near_the_best_of_its_rank():
    cs, omega = sites(ranks=(4, 4, 4), out=40, inp=50), fedask.probe(1, 1, "q", 50, 10)
    got = fedask.aggregate(cs, omega, rank=4)
    best = np.linalg.norm(truncated(ideal(cs), 4)[0] - ideal(cs))
    assert best <= np.linalg.norm(got.b @ got.a - ideal(cs)) < 1.4 * best


def test_fedask_probe_is_the_same_everywhere_and_fresh_every_round():
    first = fedask.probe(7, 2, "q", 11, 4)
    assert first.dtype == np.float32
    assert first.tobytes() == fedask.probe(7, 2, "q", 11, 4).tobytes()
    assert not np.array_equal(first, fedask.probe(7, 3, "q", 11, 4))
    assert not np.array_equal(first, fedask.probe(7, 2, "k", 11, 4))
