"""RDA: the mean length along the mean direction."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from strategies.outer.rda import is_embedding, merge
from strategies.outer.solo import is_degraded

HALF = np.array([0.5, 0.5])


def test_orthogonal_steps_keep_their_length():
    """Two unit steps at a right angle: the mean has length .71, RDA has 1."""
    found = merge([np.float32([1, 0]), np.float32([0, 1])], HALF)
    assert np.allclose(found, np.sqrt([0.5, 0.5]))
    assert np.allclose(merge([np.float32([1, 0]), np.float32([0, 1])], HALF, plain=True), [0.5, 0.5])


def test_opposed_steps_give_zero_and_a_zero_step_no_direction():
    assert merge([np.float32([2, 0]), np.float32([-1, 0])], HALF).tolist() == [0.0, 0.0]
    assert np.allclose(merge([np.float32([0, 0]), np.float32([0, 4])], HALF), [0.0, 2.0])


def test_an_opposing_site_shortens_the_mean_and_not_rda():
    """Table row 15: three sites agree, one opposes."""
    rows = [np.float32([1, 0.1 * i]) for i in range(3)] + [np.float32([-1, 0])]
    weights = np.full(4, 0.25)
    assert np.linalg.norm(merge(rows, weights)) > 1.9 * np.linalg.norm(merge(rows, weights, plain=True))


@settings(max_examples=50, deadline=None)
@given(arrays(np.float32, (3, 5), elements=st.floats(-4, 4, width=16)))
def test_scale_and_permutation(rows):
    weights = np.array([0.2, 0.3, 0.5])
    found = merge(list(rows), weights)
    assert np.allclose(merge(list(rows[::-1]), weights[::-1]), found, atol=1e-9)
    assert np.allclose(merge([4 * r for r in rows], weights), 4 * found, atol=1e-6)
    # Never longer than the longest of the sites' steps.
    assert np.linalg.norm(found) <= max(np.linalg.norm(rows.astype(np.float64), axis=1)) + 1e-9


def test_embeddings_by_name():
    assert is_embedding("transformer.wte.weight") and is_embedding("model.embed_tokens.weight")
    assert not is_embedding("h.0.attn.c_attn.weight")


def test_a_degraded_round_is_one_of_several_asked():
    assert is_degraded("whole", 4, 1)
    assert not is_degraded("whole", 1, 1)
    assert not is_degraded("whole", 4, 2)
    assert not is_degraded("damped", 4, 1)
