"""Integer sums: exact, no wrap at the limit, refusal one past it."""

import numpy as np
import pytest

from compression import EncodeError, FrameError
from compression.secure_sum import SumPlan, add, decode_sum, pack, residues, unpack
from umbel.errors import ConfigError


@pytest.mark.parametrize(
    ("level", "sites", "weight", "bits"), [(1, 1, 1, 2), (127, 2, 1, 9), (7, 10, 1, 8), (127, 10, 100, 18)]
)
def test_width_is_the_smallest_that_cannot_wrap(level, sites, weight, bits):
    plan = SumPlan(0.5, level, sites, weight)
    assert plan.modulus_bits == bits
    assert 2 ** (bits - 1) < 2 * plan.largest_sum + 1 <= 2**bits


@pytest.mark.parametrize("sign", [1, -1])
def test_all_sites_at_the_limit_do_not_wrap(sign):
    plan = SumPlan(0.25, 127, 5, 3)
    x = np.full(4, sign * 127 * 0.25)
    total = add([residues(x, plan, weight=3, seed=s) for s in range(5)], plan)
    assert decode_sum(total, plan).tolist() == [sign * 5 * 3 * 127 * 0.25] * 4


@pytest.mark.parametrize("value", [127.5 * 0.25 + 0.25, -128.5 * 0.25, np.nan, np.inf, -np.inf])
def test_one_past_the_limit_is_refused_at_the_site(value):
    with pytest.raises(EncodeError):
        residues(np.array([0.0, value]), SumPlan(0.25, 127, 5))


@pytest.mark.parametrize("weight", [0, -1, 4, 1.0, True])
def test_a_weight_that_was_not_announced_is_refused(weight):
    with pytest.raises(EncodeError, match="weight"):
        residues(np.zeros(2), SumPlan(1.0, 1, 2, 3), weight=weight)


def test_masks_cancel_and_a_missing_one_is_noticed():
    plan, rng = SumPlan(0.01, 1000, 3), np.random.default_rng(0)
    x = rng.uniform(-9, 9, (3, 500))
    mask = rng.integers(0, plan.mask, 500, dtype=np.uint64)
    parts = [residues(row, plan, seed=i) for i, row in enumerate(x)]
    masked = [parts[0] + mask & np.uint64(plan.mask), parts[1] - mask & np.uint64(plan.mask), parts[2]]
    total = decode_sum(add(masked, plan), plan)
    assert np.abs(total - x.sum(axis=0)).max() < 3 * plan.step
    assert (total == decode_sum(add(parts, plan), plan)).all()
    with pytest.raises(FrameError, match="did not cancel"):
        decode_sum(add([masked[0], parts[1], parts[2]], plan), plan)


def test_stochastic_rounding_is_unbiased():
    plan, x = SumPlan(1.0, 3, 1), np.linspace(-2, 2, 41)
    mean = np.mean([decode_sum(residues(x, plan, seed=s), plan) for s in range(2000)], axis=0)
    assert np.abs(mean - x).max() < 0.06


def test_packed_width_is_the_promised_one():
    plan = SumPlan(0.1, 7, 10)
    values = residues(np.linspace(-0.6, 0.6, 101), plan)
    data = pack(values, plan)
    assert len(data) == -(-101 * 8 // 8)  # against 64 bits a value in an int64 scheme
    assert (unpack(data, 101, plan) == values).all()
    for bad in (data[:-1], data + b"\0"):
        with pytest.raises(FrameError):
            unpack(bad, 101, plan)


def test_illegal_plans():
    for bad in (
        {"step": 0.0},
        {"step": np.nan},
        {"max_level": 0},
        {"max_sites": 1.5},
        {"max_level": 1 << 61},
    ):
        with pytest.raises(ConfigError):
            SumPlan(**({"step": 1.0, "max_level": 3, "max_sites": 2} | bad))
