"""Properties of the server optimisers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.aggregation.outer import SGD, Adaptive, fednova_factors

MAKERS = {
    "sgd": lambda: SGD(0.5),
    "nesterov": lambda: SGD(0.7, 0.9, nesterov=True),
    "adam": lambda: Adaptive("adam"),
    "yogi": lambda: Adaptive("yogi"),
    "adagrad": lambda: Adaptive("adagrad"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_steps_commute_with_a_permutation_of_coordinates_and_with_the_sign(make, seed):
    """A rule may treat coordinates neither by position nor by sign."""
    rng = np.random.default_rng(seed)
    order, moves = rng.permutation(6), rng.normal(size=(3, 6))
    plain, turned, mirrored = np.zeros(6), np.zeros(6), np.zeros(6)
    for x, change in ((plain, lambda v: v), (turned, lambda v: v[order]), (mirrored, lambda v: -v)):
        optimizer = make()
        for move in moves:
            optimizer.step({"x": x}, {"x": x + change(move)})
    assert np.array_equal(plain[order], turned)
    assert np.array_equal(plain, -mirrored)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_first_step_goes_towards_the_average(make, seed):
    rng = np.random.default_rng(seed)
    x, average = {"x": np.zeros(5)}, {"x": rng.normal(size=5)}
    make().step(x, average)
    assert (np.sign(x["x"]) == np.sign(average["x"])).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=6))
def test_fednova_restores_the_common_step_count(pairs):
    """Sites whose delta is proportional to their steps all pull alike after the scaling."""
    weights, steps = zip(*pairs)
    scaled = fednova_factors(weights, steps) * np.array(steps)
    assert np.allclose(scaled, np.average(steps, weights=weights))
