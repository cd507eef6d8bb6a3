"""Properties of the product algebra over random shapes, ranks and weights (T2, T3)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.aggregation.products import inner, norm_of_sum, procrustes, qr_svd, stack


@st.composite
def sums(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out, inp = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    ranks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return [(float(rng.normal()), rng.normal(size=(out, r)), rng.normal(size=(r, inp))) for r in ranks]


def dense(terms):
    return sum(w * b @ a for w, b, a in terms)


@settings(max_examples=80, deadline=None)
@given(sums())
def test_every_form_of_the_sum_agrees(terms):
    exact = dense(terms)
    b, a = stack(terms)
    full = qr_svd(terms)
    assert np.allclose(b @ a, exact, atol=1e-10)
    assert np.allclose(full.b @ full.a, exact, atol=1e-10)
    assert np.isclose(norm_of_sum(terms), np.linalg.norm(exact), atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(sums(), st.integers(1, 6))
def test_truncation_is_optimal_and_its_tail_is_its_error(terms, rank):
    exact, got = dense(terms), qr_svd(terms, rank)
    sigma = np.linalg.svd(exact, compute_uv=False)
    error = np.linalg.norm(got.b @ got.a - exact)
    assert np.isclose(error, np.linalg.norm(sigma[rank:]), atol=1e-10)
    assert np.isclose(got.tail * np.linalg.norm(exact), error, atol=1e-10)
    assert got.b.shape[1] == got.a.shape[0] == rank


@settings(max_examples=60, deadline=None)
@given(sums(), st.integers(0, 2**32 - 1))
def test_the_gauge_of_a_site_does_not_matter_t2(terms, seed):
    rng = np.random.default_rng(seed)
    turned = []
    for w, b, a in terms:
        gauge = rng.normal(size=(b.shape[1],) * 2) + 3 * np.eye(b.shape[1])
        turned.append((w, b @ gauge, np.linalg.solve(gauge, a)))
    assert np.allclose(dense(turned), dense(terms), atol=1e-6)
    got, want = qr_svd(turned), qr_svd(terms)
    assert np.allclose(got.b @ got.a, want.b @ want.a, atol=1e-6)
    first, second = turned[0][1:], terms[0][1:]
    assert np.isclose(inner(first, first), inner(second, second), rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_procrustes_never_moves_the_product_nor_further_from_the_old_factor(seed, rank):
    rng = np.random.default_rng(seed)
    b, old, a = rng.normal(size=(7, rank)), rng.normal(size=(7, rank)), rng.normal(size=(rank, 5))
    b_new, a_new = procrustes(b, a, old)
    assert np.allclose(b_new @ a_new, b @ a, atol=1e-10)
    assert np.linalg.norm(b_new - old) <= np.linalg.norm(b - old) + 1e-10
