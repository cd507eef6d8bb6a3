"""FlexLoRA: redistribute the exact mean by truncated SVD, to each site at its own rank.

    U S V^T = svd(sum p_i s_i B_i A_i);   B = U_r sqrt(S_r / s),  A = sqrt(S_r / s) V_r^T

Bai et al. 2024, arXiv 2402.11505; the SVD runs on QR factors (`products.qr_svd`), and both factors carry the
square root so that their learning rates stay balanced. The served update is the best of its rank; what
truncation drops is `tail`. Singular vectors may turn from round to round, so kept optimiser moments are
wrong: align to the previous B, or reset them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from strategies.aggregation.products import LowRank, Term, procrustes, qr_svd
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Contribution, Factors, ideal_terms

CAPABILITIES = Capabilities(
    heterogeneous_rank=True, stale_updates=False, joiner_needs="factors at its rank", note="error is the tail"
)


class Target(NamedTuple):
    """Rank and scale of one kind of site."""

    rank: int
    scale: float


class Redistributed(NamedTuple):
    """Factors for one target, and the share of the Frobenius norm that its rank leaves out."""

    factors: Factors
    tail: float


def aggregate(
    contributions: Iterable[Contribution], targets: Iterable[Target], previous_b: np.ndarray | None = None
) -> dict[Target, Redistributed]:
    """Return float64 factors for every target from one SVD. `previous_b` aligns those of equal shape."""
    return redistribute(ideal_terms(contributions), targets, previous_b)


def redistribute(
    terms: list[Term], targets: Iterable[Target], previous_b: np.ndarray | None = None
) -> dict[Target, Redistributed]:
    """As `aggregate`, for any sum of products; also the last step of the rank-partitioned rule."""
    wanted = list(targets)
    full = qr_svd(terms, max(t.rank for t in wanted))
    return {target: _serve(full, target, previous_b) for target in wanted}


def _serve(full: LowRank, target: Target, previous_b: np.ndarray | None) -> Redistributed:
    root = np.sqrt(target.scale)
    b, a = full.b[:, : target.rank] / root, full.a[: target.rank] / root
    if previous_b is not None and previous_b.shape == b.shape:
        b, a = procrustes(b, a, previous_b)
    sigma = full.singular_values
    total = float(np.linalg.norm(sigma))
    tail = float(np.linalg.norm(sigma[target.rank :])) / total if total > 0 else 0.0
    return Redistributed(Factors(a, b), tail)
