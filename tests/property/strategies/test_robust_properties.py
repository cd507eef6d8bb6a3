"""Required of every robust rule: permutation invariance, translation equivariance, exactness at f = 0."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.aggregation.robust.clipping import centred_clipping, norm_clipping
from strategies.aggregation.robust.coordinate import coordinate_median, trimmed_mean
from strategies.aggregation.robust.geometric_median import geometric_median
from strategies.aggregation.robust.krum import krum, multi_krum

# rule(rows, f, reference): the reference is the server's point, which moves along with a translation.
RULES = {
    "median": lambda rows, f, ref: coordinate_median(rows, f).value,
    "trimmed": lambda rows, f, ref: trimmed_mean(rows, f).value,
    "krum": lambda rows, f, ref: krum(rows, f).value,
    "multi_krum": lambda rows, f, ref: multi_krum(rows, f).value,
    "geometric": lambda rows, f, ref: geometric_median(rows, f).value,
    "centred": lambda rows, f, ref: centred_clipping(rows, 1.0, ref, f, num_iterations=3).value,
    "norm_clip": lambda rows, f, ref: ref + norm_clipping([r - ref for r in rows], 1.0, f).value,
}


@st.composite
def cohorts(draw):
    f = draw(st.integers(0, 2))
    num, size = draw(st.integers(2 * f + 3, 9)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Multiples of 1/8: sums and shifts are exact, so ties are real ties.
    return np.round(8 * rng.normal(size=(num, size))) / 8, f, rng


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@settings(max_examples=30, deadline=None)
@given(cohorts())
def test_permutation_invariance(rule, cohort):
    rows, f, rng = cohort
    zero = np.zeros(rows.shape[1])
    shuffled = rows[rng.permutation(len(rows))]
    assert np.allclose(rule(list(shuffled), f, zero), rule(list(rows), f, zero), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@settings(max_examples=30, deadline=None)
@given(cohorts())
def test_translation_equivariance(rule, cohort):
    rows, f, rng = cohort
    zero, shift = np.zeros(rows.shape[1]), np.round(8 * rng.normal(size=rows.shape[1]))
    moved = rule(list(rows + shift), f, shift)
    assert np.allclose(moved, rule(list(rows), f, zero) + shift, rtol=0, atol=1e-6)


MEANS = {
    "trimmed": lambda rows: trimmed_mean(rows, 0),
    "multi_krum": lambda rows: multi_krum(rows, 0),
    "centred": lambda rows: centred_clipping(rows, float("inf")),
    "norm_clip": lambda rows: norm_clipping(rows, float("inf")),
}


@pytest.mark.parametrize("rule", MEANS.values(), ids=MEANS.keys())
@settings(max_examples=30, deadline=None)
@given(cohorts())
def test_mean_type_rules_are_the_mean_when_nothing_is_tolerated(rule, cohort):
    rows, _, _ = cohort
    got = rule(list(rows))
    assert np.allclose(got.value, rows.mean(axis=0), rtol=0, atol=1e-12)
    assert got.discarded_share == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(cohorts())
def test_coordinate_rules_give_the_same_bits_in_any_order_t4(cohort):
    rows, f, rng = cohort
    rows = rows / 3
    shuffled = list(rows[rng.permutation(len(rows))])
    assert trimmed_mean(shuffled, f).value.tobytes() == trimmed_mean(list(rows), f).value.tobytes()
    assert coordinate_median(shuffled).value.tobytes() == np.median(rows, axis=0).tobytes()


@settings(max_examples=40, deadline=None)
@given(cohorts())
def test_trimmed_mean_lies_within_the_honest_values(cohort):
    """Any f rows may be liars: the result stays inside the range of the others, coordinate by coordinate."""
    rows, f, rng = cohort
    liars = rng.permutation(len(rows))[:f]
    honest = np.delete(rows, liars, axis=0)
    rows[liars] = rng.choice([-1e9, 1e9])
    got = trimmed_mean(list(rows), f).value
    assert (got >= honest.min(axis=0) - 1e-12).all()
    assert (got <= honest.max(axis=0) + 1e-12).all()


@pytest.mark.parametrize("rule", [geometric_median, norm_clipping, multi_krum])
@settings(max_examples=30, deadline=None)
@given(cohorts())
def test_the_report_reproduces_the_value(rule, cohort):
    rows, f, _ = cohort
    got = rule(list(rows), num_byzantine=f)
    assert np.allclose(got.effective_weights @ rows, got.value, atol=1e-12)
    assert 0.0 <= got.discarded_share <= 1.0
