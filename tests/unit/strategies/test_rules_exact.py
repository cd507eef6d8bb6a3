"""What every exact rule owes: T1 exactness, T2 gauge, T4 order, T5 one site, T6 absent sites, T15 sums only.

D01 (every branch weighs by p_i), D02 (non-square layers, both orientations), D05 and D06 (scale), D07, D08,
D13, H20, H24, H31. Sites have unequal p_i and alpha != r throughout.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.products import Term
from strategies.aggregation.rules import (
    carry,
    fedask,
    fedex,
    fedit,
    fedsa,
    fedsb,
    ffa,
    flexlora,
    flora,
    ravan,
    rolora,
    sums,
)
from strategies.aggregation.rules.common import (
    Contribution,
    Factors,
    by_layer,
    canonical,
    ideal_terms,
    orient,
    screen,
    with_server,
)
from umbel.errors import ConfigError

OUT, INP, RANK, SCALE = 9, 14, 4, 2.0
WEIGHTS = {"ams": 300.0, "bcn": 100.0, "cph": 50.0}


def sites(ranks=(RANK, RANK, RANK), scales=(SCALE, SCALE, SCALE), seed=0, common_a=None):
    rng = np.random.default_rng(seed)
    out = []
    for (name, weight), rank, scale in zip(WEIGHTS.items(), ranks, scales):
        a = rng.normal(size=(rank, INP)) / INP**0.5 if common_a is None else common_a
        out.append(Contribution(name, weight, scale, a, 0.1 * rng.normal(size=(OUT, rank))))
    return out


def dense(terms: list[Term]) -> np.ndarray:
    return sum(w * b @ a for w, b, a in terms)


def ideal(contributions) -> np.ndarray:
    """By hand, with plain numpy: sum p_i s_i B_i A_i."""
    total = sum(c.weight for c in contributions)
    return sum(
        c.weight / total * c.scale * (np.asarray(c.b, float) @ np.asarray(c.a, float)) for c in contributions
    )


A_0 = np.random.default_rng(9).normal(size=(RANK, INP)) / INP**0.5


def ravan_served(contributions):
    """Ravan's cores stand in for B: one head a site's own core, frozen outer factors common."""
    heads = ravan.draw_heads(1, "q", (OUT, INP), 2, RANK)
    cores = [(c.site, c.weight, {0: c.b[:RANK], 1: c.b[-RANK:]}) for c in contributions]
    total = sum(w for _, w, _ in cores)
    want = sum(
        w / total * sum(heads.b[h].astype(float) @ core @ heads.a[h] for h, core in own.items())
        for _, w, own in cores
    )
    got = ravan.export(ravan.aggregate(np.zeros((2, RANK, RANK)), cores), heads)
    return got.b @ got.a, want


def fedsb_served(contributions):
    frozen = Factors(A_0, np.random.default_rng(8).normal(size=(OUT, RANK)))
    cores = [(c.site, c.weight, c.b[:RANK]) for c in contributions]
    total = sum(w for _, w, _ in cores)
    want = sum(w / total * SCALE * frozen.b @ m @ frozen.a for _, w, m in cores)
    got = fedsb.export(fedsb.aggregate(np.zeros((RANK, RANK)), cores), frozen)
    return SCALE * got.b @ got.a, want


def served_and_ideal(rule: str, cs) -> tuple[np.ndarray, np.ndarray]:
    """Return (effective update that is served, ideal) as dense matrices."""
    if rule == "ffa":
        got = ffa.aggregate(cs, A_0)
        return SCALE * got.b @ got.a, ideal(cs)
    if rule == "rolora-B":
        got = rolora.aggregate(cs, "B", Factors(A_0, np.zeros((OUT, RANK))))
        return SCALE * got.b @ got.a, ideal(cs)
    if rule == "rolora-A":
        common_b = np.random.default_rng(8).normal(size=(OUT, RANK))
        got = rolora.aggregate(cs, "A", Factors(A_0, common_b))
        return SCALE * got.b @ got.a, ideal([c._replace(b=common_b) for c in cs])
    if rule == "flora":
        got = flora.aggregate(cs)
        return got.b @ got.a, ideal(cs)
    if rule == "flexlora":
        target = flexlora.Target(12, 3.0)
        got = flexlora.aggregate(cs, [target])[target]
        return 3.0 * got.factors.b @ got.factors.a, ideal(cs)
    if rule == "fedex":
        got = fedex.aggregate(cs)
        return SCALE * got.factors.b @ got.factors.a + got.residual.b @ got.residual.a, ideal(cs)
    if rule == "carry":
        before = Factors(np.ones((1, INP)), np.ones((OUT, 1)))
        got = carry.aggregate(cs, before)
        exported = carry.export(got.factors, SCALE, got.carry)
        return exported.b @ exported.a - before.b @ before.a, ideal(cs)
    if rule == "fedask":
        omega = fedask.probe(3, 1, "q", INP, 12)
        got = fedask.aggregate(cs, omega)
        return got.b @ got.a, ideal(cs)
    return {"fedsb": fedsb_served, "ravan": ravan_served}[rule](cs)


EXACT = ["ffa", "rolora-B", "rolora-A", "flora", "flexlora", "fedex", "carry", "fedask", "fedsb", "ravan"]
FROZEN_A = {"ffa", "rolora-B"}


def sites_for(rule, **options):
    return sites(common_a=A_0 if rule in FROZEN_A else None, **options)


@pytest.mark.parametrize("fan_in_fan_out", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("rule", EXACT)
def test_merged_weights_and_outputs_are_the_ideal_t1_d01_d02_d05_d08(rule, fan_in_fan_out):
    got, want = served_and_ideal(rule, sites_for(rule))
    rng = np.random.default_rng(4)
    base = rng.normal(size=(INP, OUT) if fan_in_fan_out else (OUT, INP))
    merged, exact = base + orient(got, fan_in_fan_out), base + orient(want, fan_in_fan_out)
    assert np.linalg.norm(want) > 0.1
    assert np.abs(merged - exact).max() < 1e-12
    x = rng.normal(size=(5, INP))
    outputs = [x @ w if fan_in_fan_out else x @ w.T for w in (merged, exact)]
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-11


@pytest.mark.parametrize("rule", EXACT)
def test_float32_in_and_out_stays_within_1e_6_t1(rule):
    cs = [c._replace(a=c.a.astype(np.float32), b=c.b.astype(np.float32)) for c in sites_for(rule)]
    if rule in FROZEN_A:
        cs = [c._replace(a=A_0) for c in cs]
    got, want = served_and_ideal(rule, cs)
    assert np.abs(got.astype(np.float32) - want).max() <= 1e-6


def test_fedit_is_the_negative_control_and_its_error_is_the_covariance():
    cs = sites()
    got = fedit.aggregate(cs)
    want, served = ideal(cs), SCALE * got.b @ got.a
    assert np.linalg.norm(served - want) / np.linalg.norm(want) > 0.1
    total = sum(WEIGHTS.values())
    covariance = sum(c.weight / total * (c.b - got.b) @ (c.a - got.a) for c in cs)
    assert np.abs(want / SCALE - got.b @ got.a - covariance).max() < 1e-12


def test_fedit_weighs_every_branch_d01():
    """Three sites, both factors: sum p_i x_i, not the first site's p_0 x_0."""
    cs = [Contribution(n, w, 1.0, np.full((1, 2), v), np.full((3, 1), -v)) for n, w, v in
          (("a", 1, 1.0), ("b", 2, 2.0), ("c", 5, 4.0))]  # fmt: skip
    got = fedit.aggregate(cs)
    assert got.a.tolist() == [[3.125, 3.125]]
    assert got.b.tolist() == [[-3.125]] * 3


GAUGE_FREE = ["flora", "flexlora", "fedex", "carry", "fedask"]


@pytest.mark.parametrize("rule", GAUGE_FREE)
def test_the_gauge_of_a_site_does_not_matter_t2(rule):
    cs, rng = sites(), np.random.default_rng(6)
    turned = []
    for c in cs:
        gauge = rng.normal(size=(RANK, RANK)) + 3 * np.eye(RANK)
        turned.append(c._replace(b=c.b @ gauge, a=np.linalg.solve(gauge, c.a)))
    assert np.abs(served_and_ideal(rule, turned)[0] - served_and_ideal(rule, cs)[0]).max() < 1e-12
    plain, moved = fedit.aggregate(cs), fedit.aggregate(turned)
    assert np.abs(plain.b @ plain.a - moved.b @ moved.a).max() > 1e-2  # control


@pytest.mark.parametrize("rule", [*EXACT, "fedit"])
def test_order_of_sites_does_not_change_a_bit_t4(rule):
    def served(cs):
        if rule == "fedit":
            got = fedit.aggregate(cs)
            return got.a.tobytes() + got.b.tobytes()
        return served_and_ideal(rule, cs)[0].tobytes()

    cs = sites_for(rule)
    reference = served(cs)
    assert all(served([cs[i] for i in order]) == reference for order in ((2, 0, 1), (1, 2, 0), (2, 1, 0)))


@pytest.mark.parametrize("rule", EXACT)
def test_one_site_gets_its_own_update_back_t5_h31_d13(rule):
    one = sites_for(rule)[:1]
    got, want = served_and_ideal(rule, one)
    assert np.abs(got - want).max() < 1e-14
    four = [one[0]._replace(site=name) for name in "abcd"]
    assert np.abs(served_and_ideal(rule, four)[0] - got).max() < 1e-13


@pytest.mark.parametrize("rule", EXACT)
def test_weight_zero_nan_and_missing_sites_leave_the_oracle_over_the_others_t6_h24(rule):
    cs = sites_for(rule)
    reference = served_and_ideal(rule, cs[:1] + cs[2:])[0]
    zero = [cs[0], cs[1]._replace(weight=0.0), cs[2]]
    usable, rejected = screen([cs[0], cs[1]._replace(b=np.full_like(cs[1].b, np.nan)), cs[2]])
    assert list(rejected) == ["bcn"]
    assert "NaN" in rejected["bcn"]
    assert screen([cs[1]._replace(weight=float("nan"))])[0] == []
    kept = [c for c in zero if c.weight > 0] if rule in ("fedsb", "ravan") else zero
    assert np.abs(served_and_ideal(rule, kept)[0] - reference).max() < 1e-14
    assert np.abs(served_and_ideal(rule, usable)[0] - reference).max() < 1e-14


@pytest.mark.parametrize("rule", ["flora", "flexlora", "fedask"])
def test_mixed_ranks_and_scales_are_exact_t7_d06(rule):
    cs = sites(ranks=(1, 2, 5), scales=(8.0, 0.5, 2.0))
    got, want = served_and_ideal(rule, cs)
    assert np.abs(got - want).max() < 1e-12


def test_two_gauges_of_one_update_h20():
    a, b = np.array([[1.0, 0.0]]), np.array([[1.0], [0.0]])
    cs = [Contribution("x", 1, 1.0, a, b), Contribution("y", 1, 1.0, -a, -b)]
    assert fedit.aggregate(cs).b.tolist() == [[0.0], [0.0]]
    for got in (flora.aggregate(cs), flexlora.aggregate(cs, [flexlora.Target(1, 1.0)])[(1, 1.0)].factors):
        assert np.allclose(got.b @ got.a, [[1.0, 0.0], [0.0, 0.0]], atol=1e-15)


def test_weights_one_and_zeros_return_the_first_adapter_bit_exactly_h20():
    rng = np.random.default_rng(0)
    cs = [Contribution(str(i), w, 2.0, rng.normal(size=(2, 5)), rng.normal(size=(3, 2))) for i, w in
          enumerate((1, 0, 0, 0, 0))]  # fmt: skip
    got = fedit.aggregate(cs)
    assert got.a.tobytes() == cs[0].a.tobytes()
    assert got.b.tobytes() == cs[0].b.tobytes()


@pytest.mark.parametrize(
    "rule", [fedit.aggregate, fedex.aggregate, lambda cs: carry.aggregate(cs, carry.empty(OUT, INP))]
)
@pytest.mark.parametrize("options", [{"ranks": (2, 4, 4)}, {"scales": (2.0, 8.0, 2.0)}])
def test_rules_that_average_factors_refuse_mixed_sites_by_name_d06(rule, options):
    with pytest.raises(ConfigError, match="ams"):
        rule(sites(**options))


def test_fixed_normalisation_adds_the_server_with_the_missing_weight():
    """B_g + sum p_i (B_i - B_g) for linear rules; the same on products for product rules."""
    cs, expected = sites_for("ffa"), 600.0
    previous = Factors(A_0, np.random.default_rng(7).normal(size=(OUT, RANK)))
    got = ffa.aggregate(with_server(cs, SCALE, previous, expected), A_0)
    want = previous.b + sum(c.weight / expected * (c.b - previous.b) for c in cs)
    assert np.abs(got.b - want).max() < 1e-14
    d_g = SCALE * previous.b @ previous.a
    product = flora.aggregate(with_server(sites(), SCALE, previous, expected))
    want = d_g + sum(c.weight / expected * (SCALE * c.b @ c.a - d_g) for c in sites())
    assert np.abs(product.b @ product.a - want).max() < 1e-14
    everybody = with_server(cs, SCALE, previous, sum(WEIGHTS.values()))
    assert ffa.aggregate(everybody, A_0).b.tobytes() == ffa.aggregate(cs, A_0).b.tobytes()
    with pytest.raises(ConfigError, match="expected_weight"):
        with_server(cs, SCALE, previous, 100.0)


def test_a_site_named_twice_is_refused():
    cs = sites()
    with pytest.raises(UpdateError, match=r"ams.*twice"):
        canonical([*cs, cs[0]])


def test_layers_are_paired_by_name_and_sites_without_a_layer_are_left_out():
    rng = np.random.default_rng(0)

    def arrays(*modules):
        return {f"{m}.lora_{k}.weight": rng.normal(size=(2, 2)) for m in modules for k in "BA"}

    updates = [("y", 1.0, arrays("q", "v")), ("x", 3.0, arrays("q"))]
    found = dict(by_layer(updates, {"q": 2.0, "v": 4.0}))
    assert [c.site for c in found["q"]] == ["y", "x"]
    assert [(c.site, c.scale) for c in found["v"]] == [("y", 4.0)]
    own = dict(by_layer(updates, {"y": {"q": 1.0, "v": 1.0}, "x": {"q": 5.0}}))
    assert [c.scale for c in own["q"]] == [1.0, 5.0]
    assert found["q"][0].a is updates[0][2]["q.lora_A.weight"]


def test_layer_coverage_sets_the_denominator():
    rng = np.random.default_rng(0)
    x = {"v.lora_A.weight": rng.normal(size=(1, 2)), "v.lora_B.weight": rng.normal(size=(2, 1))}
    (_, only), = by_layer([("x", 3.0, x), ("y", 5.0, {})], {"v": 2.0})  # fmt: skip
    assert np.array_equal(dense(ideal_terms(only)), 2.0 * x["v.lora_B.weight"] @ x["v.lora_A.weight"])


SECURE = {
    "fedit": (fedit.summand, fedit.from_total),
    "ffa": (ffa.summand, ffa.from_total),
    "rolora": (rolora.summand, rolora.from_total),
    "fedsa": (fedsa.summand, fedsa.from_total),
    "fedsb": (fedsb.summand, fedsb.from_total),
    "fedask-1": (fedask.first_summand, fedask.basis),
    "fedask-2": (fedask.second_summand, fedask.from_total),
    "ravan": (ravan.summand, ravan.from_total),
}


@pytest.mark.parametrize(("summand_of", "from_total"), SECURE.values(), ids=SECURE.keys())
def test_secure_rules_are_served_from_a_total_alone_t15(summand_of, from_total):
    """No parameter of the serving side is a collection of updates; the first one is the total."""
    hints = inspect.get_annotations(from_total)
    assert next(iter(hints)) == "total"
    assert not any("Contribution" in str(hint) or "Iterable" in str(hint) for hint in hints.values())
    assert "Total" in str(inspect.get_annotations(summand_of)["return"])


def test_a_total_hides_the_terms_t15():
    """Masks that cancel in the sum change every summand and nothing that is served."""
    cs, rng = canonical(sites()), np.random.default_rng(2)
    parts = [fedit.summand(c) for c in cs]
    mask = {name: np.round(1024 * rng.normal(size=array.shape)) / 1024 for name, array in parts[0].items()}
    masked = [{n: v + sign * mask[n] for n, v in p.items()} for p, sign in zip(parts, (1, -1, 0))]
    plain, hidden = fedit.from_total(sums.add(parts)), fedit.from_total(sums.add(masked))
    assert np.abs(plain.a - hidden.a).max() < 1e-12
    with pytest.raises(UpdateError, match="names or shapes"):
        sums.add([parts[0], {"weight": np.array(1.0)}])
    with pytest.raises(UpdateError, match="empty"):
        sums.add([])
    with pytest.raises(UpdateError, match="nothing"):
        sums.mean({"weight": np.array(0.0), "A": np.zeros(1)}, "A")
