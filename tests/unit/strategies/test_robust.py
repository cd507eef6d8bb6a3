"""Robust rules: exact numbers, bounds on n, breakdown, discarded share, byzfl as outside oracle (H24)."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import types

import numpy as np
import pytest

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.products import stack
from strategies.aggregation.robust import common
from strategies.aggregation.robust.clipping import (
    centred_clipping,
    centred_clipping_coefficients,
    norm_clip_factors,
    norm_clipping,
)
from strategies.aggregation.robust.coordinate import coordinate_median, trimmed_mean
from strategies.aggregation.robust.distance import (
    adapter_gram,
    adapter_squared_distances,
    combined_terms,
    squared_distances,
)
from strategies.aggregation.robust.geometric_median import geometric_median, geometric_median_coefficients
from strategies.aggregation.robust.krum import krum, krum_selection, multi_krum
from umbel.errors import ConfigError


def honest(num=7, size=40, seed=0):
    rng = np.random.default_rng(seed)
    return [1.0 + 0.1 * rng.normal(size=size) for _ in range(num)]


def column(*values):
    return [np.array([v]) for v in values]


def test_trimmed_mean_and_median_by_hand():
    rows = column(1.0, 2.0, 9.0, 4.0, -50.0)
    got = trimmed_mean(rows, 1)
    assert got.value.tolist() == [7 / 3]
    assert got.effective_weights.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 0])
    assert got.discarded_share == pytest.approx(0.4)
    assert coordinate_median(rows).value.tolist() == [2.0]
    assert coordinate_median(column(1.0, 2.0, 9.0, 4.0)).value.tolist() == [3.0]
    assert coordinate_median(column(5.0)).value.tolist() == [5.0]


def test_krum_by_hand():
    """n = 5, f = 1: two neighbours each. Scores 1+4, 1+1, 1+4, 49+64, 8100+.. : the middle one wins."""
    rows = column(0.0, 1.0, 2.0, 9.0, 99.0)
    got = krum(rows, 1)
    assert got.value.tolist() == [1.0]
    assert got.discarded_share == pytest.approx(0.8)
    assert krum_selection(squared_distances(rows), 1, 3).tolist() == [0, 1, 2]
    assert multi_krum(rows, 1, 2, weights=[1, 3, 1, 9, 9]).value.tolist() == [0.75]


def test_krum_equals_brute_force_over_subsets():
    rng = np.random.default_rng(4)
    for _ in range(20):
        rows, f = list(rng.normal(size=(7, 3))), int(rng.integers(0, 3))
        scores = [
            min(
                sum(np.sum((rows[i] - rows[j]) ** 2) for j in near)
                for near in itertools.combinations([j for j in range(7) if j != i], 7 - f - 2)
            )
            for i in range(7)
        ]
        best = np.argsort(scores)[: 7 - f]
        assert np.allclose(multi_krum(rows, f).value, np.mean([rows[i] for i in best], axis=0))


def test_geometric_median_of_points_on_a_line_is_their_median():
    got = geometric_median(column(0.0, 1.0, 2.0, 50.0, 1000.0))
    assert got.value[0] == pytest.approx(2.0, abs=1e-2)
    triangle = [np.array([1.0, 0.0]), np.array([-0.5, 3**0.5 / 2]), np.array([-0.5, -(3**0.5) / 2])]
    assert np.abs(geometric_median(triangle).value).max() < 1e-9


def test_geometric_median_has_zero_gradient_and_weights_count():
    rows, weights = honest(6, 5), np.array([3.0, 1, 1, 1, 1, 1])
    z = geometric_median(rows, weights=weights).value
    pull = sum(w * (x - z) / np.linalg.norm(x - z) for w, x in zip(weights, rows))
    assert np.linalg.norm(pull) < 1e-5
    repeated = geometric_median([rows[0], rows[0], *rows]).value
    assert np.abs(repeated - z).max() < 1e-6


def test_geometric_median_of_equal_rows_is_that_row():
    assert geometric_median([np.array([2.0, 3.0])] * 4).value.tolist() == [2.0, 3.0]
    majority = [*[np.ones(3)] * 3, *[np.full(3, 1e9)] * 2]
    assert np.abs(geometric_median(majority, 2).value - 1.0).max() < 1e-4


def test_centred_clipping_by_hand():
    rows = [np.array([3.0, 4.0]), np.array([0.0, 0.5]), np.array([0.0, -100.0])]
    got = centred_clipping(rows, 1.0)
    assert np.allclose(got.value, [0.6 / 3, (0.8 + 0.5 - 1.0) / 3])
    assert got.effective_weights == pytest.approx([0.2 / 3, 1 / 3, 0.01 / 3])
    twice = centred_clipping(rows, 1.0, num_iterations=2).value
    v = got.value
    assert np.allclose(twice, v + sum(d * min(1, 1 / np.linalg.norm(d)) for d in [x - v for x in rows]) / 3)


def test_norm_clipping_by_hand():
    got = norm_clipping([np.array([1.0]), np.array([-2.0]), np.array([300.0])])
    assert got.value[0] == pytest.approx((1 - 2 + 2) / 3)
    assert got.discarded_share == pytest.approx((1 - 2 / 300) / 3)
    assert norm_clip_factors(np.zeros(3)).tolist() == [1.0, 1.0, 1.0]


ALL = [
    lambda rows, f: coordinate_median(rows, f),
    lambda rows, f: trimmed_mean(rows, f),
    lambda rows, f: krum(rows, f),
    lambda rows, f: multi_krum(rows, f),
    lambda rows, f: geometric_median(rows, f),
    lambda rows, f: norm_clipping(rows, num_byzantine=f),
    lambda rows, f: centred_clipping(rows, 1.0, np.full(len(rows[0]), 0.9), f, num_iterations=10),
]
NAMES = ["median", "trimmed", "krum", "multi_krum", "geometric", "norm_clip", "centred_clip"]


@pytest.mark.parametrize("rule", ALL, ids=NAMES)
@pytest.mark.parametrize("attack", [1e6, -1e6])
def test_two_liars_of_nine_do_not_move_the_result_far(rule, attack):
    rows = [*honest(), np.full(40, attack), np.full(40, attack)]
    assert np.abs(np.mean(rows, axis=0)).min() > 1e5
    error = np.linalg.norm(rule(rows, 2).value - 1.0)
    # Clipping only bounds the pull: 2/9 of a clipped length, here up to sqrt(40) * 2 * 2/9.
    assert error < (3.0 if rule in (ALL[5],) else 1.5)


@pytest.mark.parametrize("rule", [ALL[0], ALL[1], ALL[4]], ids=["median", "trimmed", "geometric"])
def test_breakdown_only_above_the_largest_f(rule):
    """n = 5: two liars are survived, three take over."""
    two = [*honest(3), *[np.full(40, 1e9)] * 2]
    three = [*honest(2), *[np.full(40, 1e9)] * 3]
    got = rule(two, 2).value
    assert np.linalg.norm(got - 1.0) < 1.0
    # How far away the liars are does not matter, and their size must not drown the honest distances in rounding.
    nearer = rule([*honest(3), *[np.full(40, 1e6)] * 2], 2).value
    assert np.abs(got - nearer).max() < 1e-6
    assert rule(three, 2).value.min() > 1e8


@pytest.mark.parametrize(
    ("rule", "f", "bound"),
    [(rule, 2, 7 if name.endswith("krum") else 5) for rule, name in zip(ALL, NAMES)],
    ids=NAMES,
)  # fmt: skip
def test_too_few_sites_is_a_config_error(rule, f, bound):
    rule(honest(bound), f)
    with pytest.raises(ConfigError, match=f"at least {bound} sites"):
        rule(honest(bound - 1), f)
    with pytest.raises(ConfigError, match="negative"):
        rule(honest(bound), -1)


@pytest.mark.parametrize("rule", ALL, ids=NAMES)
def test_a_row_with_nan_or_of_another_length_is_named_h24(rule):
    with pytest.raises(UpdateError, match=r"row 2|row 3"):  # centred clipping puts its center in front
        rule([*honest(2), np.full(40, np.nan), *honest(5)], 0)
    with pytest.raises(UpdateError, match=r"row 2|row 3"):
        rule([*honest(2), np.zeros(1), *honest(5)], 0)


@pytest.mark.parametrize(
    "options",
    [{"radius": 0.0}, {"radius": float("nan")}, {"radius": 1.0, "num_iterations": 0}],
)
def test_centred_clipping_refuses_senseless_options(options):
    with pytest.raises(ConfigError):
        centred_clipping(honest(), **options)


def test_multi_krum_refuses_to_select_a_liar_by_number():
    with pytest.raises(ConfigError, match="num_selected"):
        multi_krum(honest(7), 2, 6)


@pytest.mark.parametrize("weights", [[1, 2], [-1, 1, 1], [0, 0, 0], [float("nan"), 1, 1]])
def test_unusable_weights_are_refused(weights):
    with pytest.raises(UpdateError, match="weights"):
        geometric_median(honest(3), weights=weights)


@pytest.mark.parametrize("rule", ALL, ids=NAMES)
def test_blocks_of_coordinates_do_not_change_the_result(rule, monkeypatch):
    whole = rule(honest(7), 1)
    monkeypatch.setattr(common, "BLOCK", 7)
    blocks = rule(honest(7), 1)
    assert np.allclose(whole.value, blocks.value, rtol=0, atol=1e-12)
    assert whole.effective_weights == pytest.approx(blocks.effective_weights)


def adapters(seed=0, num=6):
    """Sites of rank 1..3 and scales 1..6 around one common update; the last is scaled up hundredfold."""
    rng = np.random.default_rng(seed)
    base_b, base_a = rng.normal(size=(8, 2)), rng.normal(size=(2, 5))
    out = []
    for i in range(num):
        b = np.concatenate([base_b, 0.1 * rng.normal(size=(8, 1))], axis=1)
        a = np.concatenate([base_a, rng.normal(size=(1, 5))], axis=0)
        gauge = rng.normal(size=(3, 3)) + 3 * np.eye(3)
        scale = float(i + 1)
        loud = 100.0 if i == num - 1 else 1.0
        out.append(
            {"q": (scale, loud * b @ gauge / scale, np.linalg.solve(gauge, a)), "v": (2.0, b[:, :1], a[:1])}
        )
    return out


def dense(adapter):
    return np.concatenate([(s * b @ a).ravel() for s, b, a in adapter.values()])


def test_adapter_geometry_is_that_of_the_dense_products():
    sites = adapters()
    rows = [dense(site) for site in sites]
    gram = np.array([[x @ y for y in rows] for x in rows])
    assert np.allclose(adapter_gram(sites), gram, rtol=1e-9)
    assert np.allclose(adapter_squared_distances(sites), squared_distances(rows), rtol=1e-6, atol=1e-6)


def test_adapter_geometry_takes_mixed_ranks_and_missing_layers():
    sites = adapters()
    sites[1] = {"q": sites[1]["q"]}
    sites[2]["q"] = (3.0, sites[2]["q"][1][:, :1], sites[2]["q"][2][:1])
    rows = [dense(s) if "v" in s else np.concatenate([dense(s), np.zeros(40)]) for s in sites]
    assert np.allclose(adapter_gram(sites), [[x @ y for y in rows] for x in rows], rtol=1e-9)


def test_krum_and_geometric_median_find_the_loud_adapter_in_product_space():
    """Poisoning by scale hides from factor norms (its A is ordinary) and shows in s B A."""
    squared = adapter_squared_distances(adapters())
    assert krum_selection(squared, 1).tolist() == [0, 1, 2, 3, 4]
    coefficients = geometric_median_coefficients(squared)
    assert coefficients[5] < 0.01
    rows = [dense(site) for site in adapters()]
    assert np.allclose(geometric_median(rows).effective_weights, coefficients, atol=1e-4)
    with_center = np.zeros((7, 7))
    with_center[1:, 1:] = squared
    with_center[0, 1:] = with_center[1:, 0] = np.diagonal(adapter_gram(adapters()))
    got = centred_clipping_coefficients(with_center, 20.0)[1:]
    assert got == pytest.approx(centred_clipping(rows, 20.0).effective_weights, rel=1e-6)


def test_coefficients_become_an_adapter_through_its_products():
    sites = adapters()
    coefficients = geometric_median_coefficients(adapter_squared_distances(sites))
    value = geometric_median([dense(site) for site in sites]).value
    b, a = stack(combined_terms(sites, coefficients, "q"))
    assert np.allclose((b @ a).ravel(), value[:40], atol=1e-3)
    assert len(combined_terms(sites, [0, 1, 0, 0, 0, 0], "v")) == 1


@pytest.fixture(scope="module")
def byzfl():
    """Load byzfl's aggregators alone: its top-level module also wants torchvision, not needed here."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("byzfl is not installed; the brute-force oracles of this file still run")
    parent = types.ModuleType("byzfl")
    parent.__path__ = list(spec.submodule_search_locations or [])
    before = set(sys.modules)
    sys.modules["byzfl"] = parent
    try:
        yield importlib.import_module("byzfl.aggregators.aggregators")
    except ImportError as error:
        pytest.skip(
            f"byzfl cannot be imported here ({error}); the brute-force oracles of this file still run"
        )
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "byzfl" and n not in before]:
            del sys.modules[name]


@pytest.mark.parametrize("f", [1, 2])
def test_equal_to_byzfl(byzfl, f):
    rows = np.array([*honest(9, seed=f), *[np.full(40, 5.0)] * f])
    listed = list(rows)
    assert np.allclose(trimmed_mean(listed, f).value, byzfl.TrMean(f)(rows))
    assert np.allclose(coordinate_median(listed).value, byzfl.Median()(rows))
    # byzfl sums n - f - 1 neighbours, the paper n - f - 2: its f + 1 scores as our f.
    assert np.allclose(krum(listed, f).value, byzfl.Krum(f + 1)(rows))
    theirs = byzfl.MultiKrum(f + 1)(rows)
    assert np.allclose(multi_krum(listed, f, len(rows) - f - 1).value, theirs)
    assert np.allclose(geometric_median(listed).value, byzfl.GeometricMedian(nu=1e-6, T=400)(rows), atol=1e-5)
    ours = centred_clipping(listed, 0.7, num_iterations=3).value
    assert np.allclose(ours, byzfl.CenteredClipping(L=3, tau=0.7)(rows))
