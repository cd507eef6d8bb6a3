"""Fed-PLoRA and EcoLoRA: rules where a site sends a part, and every part has its own denominator (T7)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.rules import ecolora, fedplora
from strategies.aggregation.rules.common import Factors
from strategies.aggregation.rules.ecolora import SegmentUpdate
from strategies.aggregation.rules.fedplora import ModuleUpdate

PREVIOUS = Factors(np.arange(8, dtype=float).reshape(4, 2), np.arange(12, dtype=float).reshape(3, 4))


def test_modules_are_averaged_over_their_trainers_t7():
    x = ModuleUpdate("x", 3.0, [0, 2], np.array([[1.0, 1], [2, 2]]), np.array([[1.0, 2]] * 3))
    y = ModuleUpdate("y", 1.0, [2], np.array([[6.0, 6]]), np.array([[6.0]] * 3))
    gone = ModuleUpdate("z", 0, [3], np.ones((1, 2)), np.ones((3, 1)))
    got = fedplora.aggregate(PREVIOUS, [y, gone, x])
    assert got.factors.a[[0, 2]].tolist() == [[1.0, 1.0], [3.0, 3.0]]
    assert got.factors.b[:, [0, 2]].tolist() == [[1.0, 3.0]] * 3
    assert got.factors.a[[1, 3]].tobytes() == PREVIOUS.a[[1, 3]].tobytes()
    assert got.factors.b[:, [1, 3]].tobytes() == PREVIOUS.b[:, [1, 3]].tobytes()
    assert got.coverage.tolist() == [1, 0, 2, 0]
    assert fedplora.aggregate(PREVIOUS, [x, y]).factors.b.tobytes() == got.factors.b.tobytes()


def test_rest_plus_selected_is_the_whole_adapter():
    rest, selected = fedplora.split(PREVIOUS, [1, 3])
    assert selected.a.tolist() == PREVIOUS.a[[1, 3]].tolist()
    assert np.array_equal(rest.b @ rest.a + selected.b @ selected.a, PREVIOUS.b @ PREVIOUS.a)


@pytest.mark.parametrize(("num_trained", "cohort"), [(1, 1), (3, 1), (3, 2), (8, 1), (5, 3)])
def test_selection_rotates_until_every_module_is_covered(num_trained, cohort):
    rounds = math.ceil(8 / (num_trained * cohort))
    chosen = [
        fedplora.select(8, num_trained, p, r, cohort) for r in range(1, rounds + 1) for p in range(cohort)
    ]
    assert all(len(set(c)) == num_trained and c == sorted(c) for c in chosen)
    assert {j for c in chosen for j in c} == set(range(8))


@pytest.mark.parametrize("selected", [[4], [-1], [1, 1], [0, 1]])
def test_a_selection_that_does_not_fit_is_refused_by_site(selected):
    bad = ModuleUpdate("x", 1.0, selected, np.ones((1, 2)), np.ones((3, 1)))
    with pytest.raises(UpdateError, match="'x'"):
        fedplora.aggregate(PREVIOUS, [bad])


def test_segments_are_averaged_over_their_uploaders_and_others_keep_their_value():
    previous = np.arange(10, dtype=np.float32)
    updates = [
        SegmentUpdate("y", 1.0, 0, np.full(3, 9.0)),
        SegmentUpdate("x", 3.0, 0, np.full(3, 1.0)),
        SegmentUpdate("z", 5.0, 2, np.full(4, 7.0)),
    ]
    got = ecolora.aggregate(previous, updates, 3)
    assert got.vector.tolist() == [3.0, 3.0, 3.0, 3.0, 4.0, 5.0, 7.0, 7.0, 7.0, 7.0]
    assert got.coverage.tolist() == [2, 0, 1]


def test_segments_tile_the_vector_and_are_equal_within_one():
    for size, num in ((10, 3), (7, 7), (101, 5)):
        places = ecolora.bounds(size, num)
        assert [i for start, stop in places for i in range(start, stop)] == list(range(size))
        assert {stop - start for start, stop in places} <= {size // num, size // num + 1}


def test_a_cohort_of_at_least_n_s_covers_every_segment_every_round():
    for round_index in range(1, 12):
        assert {ecolora.segment_of(p, round_index, 5) for p in range(5)} == set(range(5))
    assert {ecolora.segment_of(2, r, 5) for r in range(1, 6)} == set(range(5))


@pytest.mark.parametrize(
    ("segment", "size", "problem"), [(3, 3, "exist"), (-1, 3, "exist"), (0, 1, "fit"), (0, 4, "fit")]
)
def test_a_wrong_segment_is_refused(segment, size, problem):
    with pytest.raises(UpdateError, match=problem):
        ecolora.aggregate(np.zeros(10), [SegmentUpdate("x", 1.0, segment, np.ones(size))], 3)


def test_mixing_and_keep_rate():
    local, received = np.array([1.0]), np.array([3.0])
    assert ecolora.mix(local, received, 0).tolist() == [1.0]
    assert ecolora.mix(local, received, math.log(2)).tolist() == pytest.approx([2.0])
    assert ecolora.mix(local, received, 100.0).tolist() == pytest.approx([3.0])
    assert ecolora.keep_rate(4.0, 4.0, 0.6) == pytest.approx(0.95)
    assert ecolora.keep_rate(4.0, 5.0, 0.6) == pytest.approx(0.95)
    assert ecolora.keep_rate(40.0, 1.0, 0.6) == pytest.approx(0.6)
