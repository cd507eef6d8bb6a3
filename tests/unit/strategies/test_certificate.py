"""The certificate against dense arithmetic, and pairing of factor names (H20, D05, D06)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from strategies.aggregation.certificate import factor_mean_error, pair_layers
from strategies.aggregation.errors import UpdateError
from umbel.errors import ConfigError

P = (0.2, 0.5, 0.3)


def clients(seed=0, out=12, inp=20, rank=4):
    rng = np.random.default_rng(seed)
    return [(p, rng.normal(size=(rank, inp)), rng.normal(size=(out, rank))) for p in P]


def factor_mean(contributions):
    total = sum(c[0] for c in contributions)
    return sum(c[0] * c[1] for c in contributions) / total, sum(c[0] * c[2] for c in contributions) / total


def test_error_of_the_factor_mean_equals_the_dense_one():
    cs, scale = clients(), 2.0
    a, b = factor_mean(cs)
    ideal = scale * sum(p * bi @ ai for p, ai, bi in cs)
    true = np.linalg.norm(scale * b @ a - ideal) / np.linalg.norm(ideal)
    got = factor_mean_error([("q", scale, cs, a, b)])
    assert got["relative_error"] == pytest.approx(true, rel=1e-12)
    assert true > 0.1
    assert (got["worst_layer"], got["layers"]) == ("q", {"q": got["relative_error"]})


def test_a_dropped_scale_shows_d05():
    cs = [(1.0, *clients()[0][1:])]
    assert factor_mean_error([("q", 2.0, cs, cs[0][1], cs[0][2])])["relative_error"] < 1e-15
    assert factor_mean_error([("q", 2.0, cs, cs[0][1], cs[0][2] / 2)])["relative_error"] == pytest.approx(0.5)


def test_each_site_enters_with_its_own_scale_d06():
    (_, a, b), *_ = clients()
    cs = [(1.0, a, b, 4.0), (1.0, a, b, 2.0)]
    assert factor_mean_error([("q", 1.0, cs, a, 3.0 * b)])["relative_error"] < 1e-15


def test_common_a_makes_the_factor_mean_exact():
    _, a, _ = clients()[0]
    cs = [(p, a, b) for p, _, b in clients()]
    _, b = factor_mean(cs)
    assert factor_mean_error([("q", 0.5, cs, a, b)])["relative_error"] < 1e-14


def test_worst_layer_is_named_and_the_total_weighs_layers_by_norm():
    exact, other = clients(1), clients(2)
    a0, b0 = exact[0][1:]
    a1, b1 = factor_mean(other)
    got = factor_mean_error(iter([("good", 1.0, [(1.0, a0, b0)], a0, b0), ("bad", 1.0, other, a1, b1)]))
    ideal = sum(p * b @ a for p, a, b in other)
    expected = np.linalg.norm(b1 @ a1 - ideal) / math.hypot(np.linalg.norm(b0 @ a0), np.linalg.norm(ideal))
    assert got["worst_layer"] == "bad"
    assert got["relative_error"] == pytest.approx(expected, rel=1e-12)
    assert got["worst_layer_error"] == got["layers"]["bad"] > got["relative_error"]


def test_zero_ideal_is_zero_or_infinite_error_never_nan():
    a, b = np.ones((1, 3)), np.ones((2, 1))
    cs = [(1.0, a, 0 * b)]
    assert factor_mean_error([("q", 1.0, cs, a, 0 * b)])["relative_error"] == 0.0
    assert factor_mean_error([("q", 1.0, cs, a, b)])["relative_error"] == math.inf


def test_unnormalised_weights_are_normalised():
    cs = [(10 * p, a, b) for p, a, b in clients()]
    a, b = factor_mean(cs)
    plain = factor_mean_error([("q", 1.0, clients(), a, b)])
    assert factor_mean_error([("q", 1.0, cs, a, b)])["relative_error"] == pytest.approx(
        plain["relative_error"]
    )


def test_weights_that_sum_to_nothing_are_refused():
    cs = [(0.0, a, b) for _, a, b in clients()]
    with pytest.raises(UpdateError, match="nothing"):
        factor_mean_error([("q", 1.0, cs, cs[0][1], cs[0][2])])


def test_no_layers_is_no_error():
    assert factor_mean_error([])["relative_error"] == 0.0


def test_pairs_are_found_by_name_whatever_the_order():
    names = [
        "m.k.lora_B.weight",
        "m.a.lora_A.weight",
        "m.a.lora_B.weight",
        "m.k.lora_A.weight",
        "head.weight",
    ]
    names += ["m.a.lora_magnitude_vector", "wte.lora_embedding_B", "wte.lora_embedding_A"]
    assert pair_layers(names) == {
        "m.a": ("m.a.lora_A.weight", "m.a.lora_B.weight"),
        "m.k": ("m.k.lora_A.weight", "m.k.lora_B.weight"),
        "wte": ("wte.lora_embedding_A", "wte.lora_embedding_B"),
    }
    assert list(pair_layers(names)) == list(pair_layers(reversed(names)))


def test_a_factor_alone_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"m\.k\.lora_B\.weight"):
        pair_layers(["m.k.lora_B.weight"])
