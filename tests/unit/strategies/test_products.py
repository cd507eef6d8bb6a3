"""Low-rank algebra against dense matrices (T3, H20, D08)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.products import inner, norm, norm_of_sum, procrustes, qr_svd, stack


def random_terms(seed=0, out=24, inp=15, ranks=(2, 4, 8), weights=(0.2, 0.5, 0.3), dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [
        (w, rng.normal(size=(out, r)).astype(dtype), rng.normal(size=(r, inp)).astype(dtype))
        for w, r in zip(weights, ranks)
    ]


def dense(terms):
    return sum(w * b.astype(np.float64) @ a.astype(np.float64) for w, b, a in terms)


def test_stack_is_the_sum_of_products_by_hand_h20():
    """Two gauges of one update: the factor mean is zero, the stack is the update."""
    a, b = np.array([[1.0, 0.0]]), np.array([[1.0], [0.0]])
    b_st, a_st = stack([(0.5, b, a), (0.5, -b, -a)])
    assert (b_st @ a_st).tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert (0.5 * b + 0.5 * -b).tolist() == [[0.0], [0.0]]


def test_stack_takes_any_sign_and_mixed_ranks():
    terms = random_terms(weights=(0.2, -1.5, 0.0))
    b, a = stack(terms)
    assert b.shape == (24, 14)
    assert np.allclose(b @ a, dense(terms), atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 8, 14])
def test_qr_svd_equals_the_truncated_dense_svd_t3(rank):
    terms = random_terms()
    got = qr_svd(terms, rank)
    u, s, vt = np.linalg.svd(dense(terms), full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ vt[:rank]
    assert np.abs(got.b @ got.a - best).max() < 1e-12
    assert np.allclose(got.singular_values, s[:14], atol=1e-12)
    assert got.tail == pytest.approx(np.linalg.norm(s[rank:]) / np.linalg.norm(s), abs=1e-12)
    # Both factors carry the square root: B^T B = A A^T = diag(sigma).
    assert np.allclose(got.b.T @ got.b, np.diag(s[:rank]), atol=1e-12)
    assert np.allclose(got.a @ got.a.T, np.diag(s[:rank]), atol=1e-12)


def test_qr_svd_with_a_negative_weight():
    terms = random_terms(weights=(0.2, -1.5, 0.4))
    got = qr_svd(terms)
    assert np.abs(got.b @ got.a - dense(terms)).max() < 1e-12
    assert got.tail == 0.0


@pytest.mark.parametrize(("out", "inp"), [(5, 40), (40, 5)])
def test_total_rank_above_a_side_of_the_matrix_d08(out, inp):
    terms = random_terms(out=out, inp=inp)
    got = qr_svd(terms, 14)
    assert (got.b.shape, got.a.shape) == ((out, 14), (14, inp))
    assert np.abs(got.b @ got.a - dense(terms)).max() < 1e-12
    assert not got.b[:, 5:].any()


def test_signs_follow_the_stated_convention():
    got = qr_svd(random_terms(), 6)
    peaks = got.b[np.argmax(np.abs(got.b), axis=0), np.arange(6)]
    assert (peaks > 0).all()
    flipped = [(w, -b, -a) for w, b, a in random_terms()]
    assert np.allclose(qr_svd(flipped, 6).b, got.b, atol=1e-10)


def test_zero_update_has_no_tail_and_no_nan():
    got = qr_svd([(1.0, np.zeros((4, 2)), np.ones((2, 3)))], 2)
    assert got.tail == 0.0
    assert not got.b.any()
    assert np.isfinite(got.a).all()


def test_inner_and_norm_equal_the_dense_ones():
    (_, b1, a1), (_, b2, a2), _ = random_terms()
    assert inner((b1, a1), (b2, a2)) == pytest.approx(np.sum((b1 @ a1) * (b2 @ a2)), rel=1e-12)
    assert norm(b1, a1) == pytest.approx(np.linalg.norm(b1 @ a1), rel=1e-12)


def test_norm_of_a_small_difference_does_not_cancel():
    """A true relative difference of 1e-9 is read to three digits; the Gram form loses it entirely."""
    (_, b, a), *_ = random_terms()
    noise = np.random.default_rng(3).normal(size=b.shape)
    other = b + 1e-9 * noise
    true = 1e-9 * np.linalg.norm(noise @ a)
    assert norm_of_sum([(1.0, other, a), (-1.0, b, a)]) == pytest.approx(true, rel=1e-3)
    gram = inner((other, a), (other, a)) + inner((b, a), (b, a)) - 2 * inner((other, a), (b, a))
    assert abs(math.sqrt(abs(gram)) / true - 1) > 0.1


def test_procrustes_keeps_the_product_and_finds_a_pure_rotation():
    (_, b, a), *_ = random_terms(ranks=(4, 4, 4))
    turn, _ = np.linalg.qr(np.random.default_rng(5).normal(size=(4, 4)))
    b_new, a_new = procrustes(b @ turn, turn.T @ a, b)
    assert np.abs(b_new - b).max() < 1e-12
    assert np.abs(a_new - a).max() < 1e-12


def test_inputs_of_bf16_width_are_lifted_to_float64_and_left_alone():
    terms = random_terms(dtype=np.float32)
    before = terms[0][1].copy()
    got = qr_svd(terms)
    assert got.b.dtype == np.float64
    assert np.abs(got.b @ got.a - dense(terms)).max() < 1e-12
    assert np.array_equal(terms[0][1], before)


@pytest.mark.parametrize(
    "terms",
    [
        [],
        [(1.0, np.zeros((3, 2)), np.zeros((3, 2)))],
        [(1.0, np.zeros((3, 2)), np.zeros((2, 4))), (1.0, np.zeros((1, 2)), np.zeros((2, 4)))],
        [(float("nan"), np.zeros((3, 2)), np.zeros((2, 4)))],
    ],
)
def test_terms_that_do_not_fit_are_refused(terms):
    with pytest.raises(UpdateError):
        stack(terms)
