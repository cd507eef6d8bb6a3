"""HetLoRA: sites of different rank, zero-padded factor mean.

    site i gets A[:r_i], B[:, :r_i];   mean of the zero-padded s_i B_i and A_i
    weights  p_i ~ w_i, or p_i ~ |s_i B_i A_i|_F ("sparsity weights")

Cho et al. 2024, arXiv 2401.06432. Still averages factors apart. Padding dilutes the high ranks, so `per_row`
gives every rank row the denominator of the sites that have it. Truncation is meaningful only if the
directions are ordered: `order_directions` re-bases the server's factors by SVD first. Norm weights reward
over-fitted or poisoned sites: cap them before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from strategies.aggregation.products import norm, qr_svd
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Contribution, Factors, canonical, shares

CAPABILITIES = Capabilities(heterogeneous_rank=True, joiner_needs="truncated factors")


class Padded(NamedTuple):
    """Mean factors of rank r_max at scale 1, and per rank row the share of weight that trained it."""

    factors: Factors
    coverage: np.ndarray


def sparsity_weights(contributions: Iterable[Contribution]) -> dict[str, float]:
    """Return site -> |s B A|_F / sum, from the factors alone."""
    norms = {c.site: abs(c.scale) * norm(c.b, c.a) for c in canonical(contributions)}
    total = sum(norms.values())
    return {site: value / total if total > 0 else 1.0 / len(norms) for site, value in norms.items()}


def aggregate(contributions: Iterable[Contribution], max_rank: int, per_row: bool = True) -> Padded:
    """Return the padded mean in float64 at scale 1; a row nobody has stays zero."""
    kept = canonical(contributions)
    a = np.zeros((max_rank, kept[0].a.shape[1]))
    b = np.zeros((kept[0].b.shape[0], max_rank))
    covered = np.zeros(max_rank)
    for p, c in zip(shares(kept).tolist(), kept):
        rank = len(c.a)
        a[:rank] += p * c.a
        b[:, :rank] += p * c.scale * c.b
        covered[:rank] += p
    if per_row:
        rows = np.where(covered > 0, covered, 1.0)
        a, b = a / rows[:, None], b / rows
    return Padded(Factors(a, b), covered)


def truncate(factors: Factors, rank: int, scale: float) -> Factors:
    """Return the first `rank` directions for a site of this scale (the server's factors have scale 1)."""
    return Factors(factors.a[:rank], factors.b[:, :rank] / scale)


def order_directions(factors: Factors) -> Factors:
    """Return the same product with directions in falling order of size."""
    low = qr_svd([(1.0, factors.b, factors.a)], len(factors.a))
    return Factors(low.a, low.b)


def tail_product(factors: Factors, kept_rank: int) -> float:
    """Return |B[:, k:]|_F |A[k:]|_F: the site's regulariser, and its sign to prune to k when it shrank."""
    return float(np.linalg.norm(factors.b[:, kept_rank:]) * np.linalg.norm(factors.a[kept_rank:]))
