"""The streaming weighted mean: exact numbers on hand-made sites (H14, H20, H24, H31, D01, D13)."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from strategies.aggregation import mean as mean_module
from strategies.aggregation.errors import UpdateError
from strategies.aggregation.mean import WeightedMean
from umbel.errors import ConfigError


def average(like, *sites, **options):
    running = WeightedMean(like, **options)
    for arrays, weight in sites:
        running.add(arrays, weight)
    return running.result()


def test_mean_of_three_sites_by_hand_d01():
    like = {"x": np.zeros(2, np.float32), "y": np.zeros((1, 1), np.float32)}
    sites = [
        ({"x": np.array([a, 0.0], np.float32), "y": np.full((1, 1), a, np.float32)}, w)
        for a, w in ((1.0, 1), (2.0, 2), (4.0, 5))
    ]
    got = average(like, *sites)
    assert got["x"].tolist() == [3.125, 0.0]
    assert got["y"].tolist() == [[3.125]]
    assert got["x"].dtype == np.float32


def test_one_contributor_is_returned_bit_exactly_h31():
    x = np.array([0.1, -0.0, 1e-45, 3.4e38, 1 / 3], np.float32)
    got = average({"x": np.ones(5, np.float32)}, ({"x": x}, 977.0))
    assert got["x"].tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_weights_one_and_zeros_return_the_first_site_bit_exactly_h20(dtype):
    rng = np.random.default_rng(0)
    sites = [({"x": rng.normal(size=(3, 2)).astype(dtype)}, w) for w in (1, 0, 0, 0, 0)]
    got = average({"x": np.zeros((3, 2), dtype)}, *sites)
    assert got["x"].dtype == np.dtype(dtype)
    assert got["x"].tobytes() == sites[0][0]["x"].tobytes()


def test_integers_bools_scalars_and_empty_tensors_keep_shape_and_dtype_h14():
    like = {
        "n": np.array(7), "mask": np.array([True, False]), "ids": np.arange(3),
        "empty": np.zeros((0, 4), np.float32), "scalar": np.array(1.0, np.float32),
    }  # fmt: skip
    first = like | {"n": np.array(10), "mask": np.array([False, False]), "scalar": np.array(2.0, np.float32)}
    second = like | {"n": np.array(13), "mask": np.array([False, True]), "scalar": np.array(5.0, np.float32)}
    got = average(like, (second, 1), (first, 2))
    assert all(isinstance(v, np.ndarray) for v in got.values())
    assert {k: (v.shape, v.dtype) for k, v in got.items()} == {k: (v.shape, v.dtype) for k, v in like.items()}
    assert got["n"].item() == 13
    assert got["mask"].tolist() == [True, False]
    assert got["ids"].tolist() == [0, 1, 2]
    assert got["scalar"].item() == 3.0


def test_integer_buffers_beyond_2_to_53_are_not_rounded_h14():
    big = 2**60 + 1
    assert average({"n": np.array(0)}, ({"n": np.array(big)}, 1), ({"n": np.array(3)}, 1))["n"].item() == big


def test_a_tensor_is_divided_by_the_weight_of_the_sites_that_sent_it():
    like = {k: np.full(1, 9.0, np.float32) for k in ("both", "one", "none")}
    running = WeightedMean(like)
    running.add({"both": np.array([1.0], np.float32)}, 3)
    running.add({"both": np.array([5.0], np.float32), "one": np.array([2.0], np.float32)}, 1)
    got = running.result()
    assert (got["both"].item(), got["one"].item(), got["none"].item()) == (2.0, 2.0, 9.0)
    assert running.coverage() == {"both": (2, 4.0), "one": (1, 1.0), "none": (0, 0.0)}


def test_nobody_leaves_the_server_state_as_it_was():
    like = {"x": np.array([1.5], np.float32), "n": np.array(4)}
    running = WeightedMean(like)
    running.add({"x": np.array([7.0], np.float32)}, 0)
    got = running.result()
    assert running.num_contributors == 0
    assert (got["x"].item(), got["n"].item()) == (1.5, 4)
    assert got["x"] is not like["x"]


def test_fixed_normalisation_takes_smaller_steps_when_sites_are_missing():
    like = {"x": np.array([1.0], np.float32)}
    sites = [({"x": np.array([3.0], np.float32)}, 1), ({"x": np.array([5.0], np.float32)}, 1)]
    options = {"normalise": "fixed", "expected_weight": 4}
    assert average(like, *sites, **options)["x"].item() == 1 + (2 + 4) / 4
    assert average(like, sites[0], **options)["x"].item() == 1.5
    assert average(like, **options)["x"].item() == 1.0


def test_fixed_equals_received_when_everybody_came():
    like = {"x": np.array([1.0, -2.0], np.float32)}
    sites = [({"x": np.array([3.0, 0.25], np.float32)}, 3), ({"x": np.array([5.0, 0.5], np.float32)}, 1)]
    fixed = average(like, *sites, normalise="fixed", expected_weight=4)
    assert fixed["x"].tolist() == average(like, *sites)["x"].tolist() == [3.5, 0.3125]


def test_four_equal_clients_move_as_one_d13():
    like, x = {"x": np.zeros(4, np.float32)}, np.array([0.1, 0.2, -0.3, 1e-8], np.float32)
    one, four = average(like, ({"x": x}, 5)), average(like, *[({"x": x}, 5)] * 4)
    assert one["x"].tobytes() == four["x"].tobytes()


@pytest.mark.parametrize(
    ("bad", "weight", "name"),
    [
        ({"x": np.array([np.nan, 0], np.float32)}, 1, "x"),
        ({"x": np.array([np.inf, 0], np.float32)}, 1, "x"),
        ({"x": np.zeros(3, np.float32)}, 1, "x"),
        ({"x": np.zeros(1, np.float32)}, 1, "x"),
        ({"x": np.zeros(2, np.int64)}, 1, "x"),
        ({"z": np.zeros(2, np.float32)}, 1, "z"),
        ({"x": np.zeros(2, np.float32)}, float("nan"), "weight"),
        ({"x": np.zeros(2, np.float32)}, -1, "weight"),
        ({"x": np.zeros(2, np.float32)}, True, "weight"),
        ({"x": np.zeros(2, np.float32)}, [1], "weight"),
    ],
)
def test_a_bad_site_is_named_and_leaves_no_trace_h24(bad, weight, name):
    """The good tensor of the bad site comes first, so a half-added update would show."""
    like = {"a": np.zeros(1, np.float32), "x": np.zeros(2, np.float32)}
    good = ({"a": np.ones(1, np.float32), "x": np.ones(2, np.float32)}, 2)
    running = WeightedMean(like)
    running.add(*good)
    with pytest.raises(UpdateError, match=name):
        running.add({"a": np.full(1, 50.0, np.float32)} | bad, weight)
    got = running.result()
    assert running.num_contributors == 1
    assert got["a"].tolist() == [1.0]
    assert got["x"].tolist() == [1.0, 1.0]


def test_blocks_do_not_change_the_result(monkeypatch):
    rng = np.random.default_rng(1)
    like = {"x": np.zeros((5, 7), np.float32)}
    sites = [({"x": rng.normal(size=(5, 7)).astype(np.float32)}, w) for w in (1, 2, 3)]
    sites.append(({"x": np.asfortranarray(sites[0][0]["x"])}, 4))
    whole = average(like, *sites, normalise="fixed", expected_weight=12)
    monkeypatch.setattr(mean_module, "BLOCK", 4)
    blocks = average(like, *sites, normalise="fixed", expected_weight=12)
    assert whole["x"].tobytes() == blocks["x"].tobytes()


def test_a_fortran_ordered_first_site_is_not_transposed_or_lost():
    x = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    got = average({"x": np.zeros((2, 3), np.float32)}, ({"x": x}, 1), ({"x": x}, 3))
    assert got["x"].tolist() == x.tolist()


@pytest.mark.parametrize(
    ("options", "key"),
    [({"normalise": "sum"}, "normalise"), ({"normalise": "fixed"}, "expected_weight"),
     ({"normalise": "fixed", "expected_weight": 0}, "expected_weight"),
     ({"normalise": "fixed", "expected_weight": float("inf")}, "expected_weight")],
)  # fmt: skip
def test_wrong_options_are_config_errors(options, key):
    with pytest.raises(ConfigError, match=key):
        WeightedMean({}, **options)


def test_memory_does_not_grow_with_the_number_of_sites():
    size = 1 << 17
    like, update = {"x": np.zeros(size, np.float32)}, {"x": np.ones(size, np.float32)}

    def peak(num_sites):
        tracemalloc.start()
        running = WeightedMean(like)
        for _ in range(num_sites):
            running.add(update, 1)
        running.result()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few, many = peak(3), peak(30)
    assert many < 1.05 * few
    assert few < 5 * size * 8


def test_complex_tensors_are_refused():
    with pytest.raises(TypeError, match="complex128"):
        WeightedMean({"x": np.zeros(1, np.complex128)})
