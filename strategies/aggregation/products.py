"""Algebra on sums of products w B A, in factor form: no out x in matrix is ever built.

    stack      B = [B_1 .. B_N],  A = [w_1 A_1; ..; w_N A_N]              B A = sum_i w_i B_i A_i, exactly
    qr_svd     B_c = [sqrt(w_i) B_i] = Q_B R_B,  A_c^T = Q_A R_A,  U' S V'^T = svd(R_B R_A^T)
               B = Q_B U'_k sqrt(S_k),  A = sqrt(S_k) (Q_A V'_k)^T,  tail = |S_{>k}| / |S|
    inner      <B A, B' A'> = tr(B^T B' A' A^T)
    procrustes P L Q^T = svd(B^T B_old), R = P Q^T:  (B R, R^T A), the product unchanged

B is [out, r], A is [r, in]; a term is (weight, B, A) and terms may differ in rank. All maths in float64
whatever the dtype given; results are float64. A negative weight goes to one side whole, its sign included.

Truncated SVD of a low-rank product through QR: Halko, Martinsson, Tropp 2011 (arXiv 0909.4061), section 5;
orthogonal Procrustes: Schoenemann 1966. No averaging rule lives here and no scale is assumed: put s into
the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strategies.aggregation.errors import UpdateError

Term = tuple[float, np.ndarray, np.ndarray]


class LowRank(NamedTuple):
    """A truncated product: B [out, k], A [k, in], all singular values of the sum, the discarded share."""

    b: np.ndarray
    a: np.ndarray
    singular_values: np.ndarray
    tail: float


def stack(terms: Sequence[Term]) -> tuple[np.ndarray, np.ndarray]:
    """Return (B [out, R], A [R, in]) with B A = sum w B_i A_i, R = sum of the ranks; any sign of w."""
    checked = _checked(terms)
    b = np.concatenate([b for _, b, _ in checked], axis=1)
    a = np.concatenate([w * a for w, _, a in checked], axis=0)
    return b, a


def balanced_stack(terms: Sequence[Term]) -> tuple[np.ndarray, np.ndarray]:
    """As `stack`, with the square root of each weight on both sides; a negative weight stays whole on B."""
    checked = _checked(terms)
    left = [math.sqrt(w) if w >= 0 else w for w, _, _ in checked]
    right = [math.sqrt(w) if w >= 0 else 1.0 for w, _, _ in checked]
    b = np.concatenate([f * b for f, (_, b, _) in zip(left, checked)], axis=1)
    a = np.concatenate([f * a for f, (_, _, a) in zip(right, checked)], axis=0)
    return b, a


def qr_svd(terms: Sequence[Term], rank: int | None = None) -> LowRank:
    """Return the best rank-`rank` approximation of sum w B A with balanced factors (B^T B = A A^T).

    `rank` None keeps min(out, in, R) directions; a larger `rank` than that is filled up with zero columns and
    rows, so that the shapes are the ones asked for. Signs: the largest entry in absolute value of each left
    singular vector is positive (the first of equals), so equal inputs give equal bits.
    """
    b, a = balanced_stack(terms)
    q_b, r_b = np.linalg.qr(b)
    q_a, r_a = np.linalg.qr(a.T)
    u, sigma, vt = np.linalg.svd(r_b @ r_a.T, full_matrices=False)
    k = len(sigma) if rank is None else min(int(rank), len(sigma))
    left, right = _fix_signs(q_b @ u[:, :k], q_a @ vt[:k].T)
    root = np.sqrt(sigma[:k])
    b_out, a_out = left * root, (right * root).T
    if rank is not None and rank > k:
        b_out = np.pad(b_out, ((0, 0), (0, rank - k)))
        a_out = np.pad(a_out, ((0, rank - k), (0, 0)))
    total = float(np.linalg.norm(sigma))
    tail = float(np.linalg.norm(sigma[k:])) / total if total > 0 else 0.0
    return LowRank(b_out, a_out, sigma, tail)


def inner(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> float:
    """Return <B A, B' A'> for (B, A), (B', A') by r x r' Gram matrices in float64.

    Subtracting such numbers to get the norm of a difference cancels; use `norm_of_sum` for that.
    """
    (b1, a1), (b2, a2) = [(_f64(b), _f64(a)) for b, a in (first, second)]
    return float(np.sum((b1.T @ b2) * (a1 @ a2.T)))


def norm(b: np.ndarray, a: np.ndarray) -> float:
    """Return the Frobenius norm of B A without forming it."""
    return math.sqrt(max(inner((b, a), (b, a)), 0.0))


def norm_of_sum(terms: Sequence[Term]) -> float:
    """Return |sum w B A|_F from the triangular QR factors: safe for differences, which Gram forms are not."""
    b, a = balanced_stack(terms)
    return float(np.linalg.norm(_triangle(b) @ _triangle(a.T).T))


def procrustes(b: np.ndarray, a: np.ndarray, b_old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rotate (B, A) so that B is as near to `b_old` [out, r] as a rotation allows; B A does not change."""
    b, a = _f64(b), _f64(a)
    p, _, qt = np.linalg.svd(b.T @ _f64(b_old))
    rotation = p @ qt
    return b @ rotation, rotation.T @ a


def _triangle(matrix: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.qr(matrix, mode="r"))


def _fix_signs(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if left.size == 0:
        return left, right
    peak = left[np.argmax(np.abs(left), axis=0), np.arange(left.shape[1])]
    sign = np.where(peak < 0, -1.0, 1.0)
    return left * sign, right * sign


def _checked(terms: Sequence[Term]) -> list[Term]:
    """Float64 copies of the terms; a shape that does not fit is named with its term."""
    if not terms:
        raise UpdateError("terms", "are empty", allowed="at least one", remedy="Skip this layer.")
    out: list[Term] = []
    for index, (weight, b, a) in enumerate(terms):
        b, a = _f64(b), _f64(a)
        fits = b.ndim == a.ndim == 2 and b.shape[1] == a.shape[0]
        if not fits or (out and (b.shape[0], a.shape[1]) != (out[0][1].shape[0], out[0][2].shape[1])):
            raise UpdateError(
                f"term {index}", "does not fit", got=(b.shape, a.shape), allowed="B [out, r], A [r, in]"
            )
        if not math.isfinite(weight):
            raise UpdateError(f"weight of term {index}", "is not finite", got=weight, allowed="a number")
        out.append((float(weight), b, a))
    return out


def _f64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
