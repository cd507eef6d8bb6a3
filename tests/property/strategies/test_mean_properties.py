"""Properties of the weighted mean over arbitrary sites."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies.aggregation.mean import WeightedMean

VALUES = st.floats(-1e6, 1e6, width=32)
SITES = st.lists(
    st.tuples(hnp.arrays(np.float32, (2, 3), elements=VALUES), st.integers(0, 1000)), min_size=1, max_size=6
)


def mean_of(like, sites, **options):
    running = WeightedMean({"x": like}, **options)
    for array, weight in sites:
        running.add({"x": array}, weight)
    return running.result()["x"]


@settings(max_examples=60, deadline=None)
@given(SITES)
def test_equals_numpy_average_and_stays_within_the_hull(sites):
    like = np.full((2, 3), 7, np.float32)
    got = mean_of(like, sites)
    weights = np.array([w for _, w in sites], np.float64)
    if weights.sum() == 0:
        assert np.array_equal(got, like)
        return
    stackd = np.stack([x for x, _ in sites]).astype(np.float64)
    # One float32 rounding of the exact value, plus float64 noise where terms cancel.
    expected = np.average(stackd, axis=0, weights=weights)
    assert np.allclose(got, expected, rtol=1e-7, atol=1e-9)
    active = stackd[weights > 0]
    assert (got >= active.min(0).astype(np.float32)).all()
    assert (got <= active.max(0).astype(np.float32)).all()


@settings(max_examples=40, deadline=None)
@given(SITES, st.integers(1, 5000))
def test_fixed_is_global_plus_scaled_received_step(sites, missing):
    like = np.arange(6, dtype=np.float64).reshape(2, 3)
    total = sum(w for _, w in sites)
    received = mean_of(like, sites)
    fixed = mean_of(like, sites, normalise="fixed", expected_weight=total + missing)
    assert np.allclose(fixed, like + (received - like) * total / (total + missing), rtol=1e-12, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(SITES)
def test_sites_of_weight_zero_do_not_change_a_bit(sites):
    like = np.zeros((2, 3), np.float32)
    assert mean_of(like, sites).tobytes() == mean_of(like, [s for s in sites if s[1] > 0]).tobytes()
