"""FedEx-LoRA: average the factors and fold the exact residual into the base.

    A, B as FedIT;   D_res = s sum p_i (B_i - B)(A_i - A);   W <- W + D_res at every site

Singhal et al. 2024, arXiv 2410.09432, in the covariance form: rank at most (N - 1) r, no cancellation, and
exactly zero for one site. Needs one rank and one scale. The base moves at all sites, not only in the cohort;
never fold into a quantised base (see `carry`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from strategies.aggregation.products import Term, qr_svd
from strategies.aggregation.rules import fedit
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import (
    Contribution,
    Factors,
    canonical,
    orient,
    require_equal,
    shares,
)

CAPABILITIES = Capabilities(
    moves_base=True,
    stale_updates=False,
    safe_4bit=False,
    exact=True,
    joiner_needs="the base and the summed residuals, A, B",
)


class Exact(NamedTuple):
    """Mean factors at the common scale, the residual at scale 1, and what a truncated residual leaves out."""

    factors: Factors
    residual: Factors
    tail: float


def residual_terms(kept: Sequence[Contribution], mean: Factors) -> list[Term]:
    """Return D_res as terms (s p_i, B_i - B, A_i - A)."""
    return [(p * c.scale, c.b - mean.b, c.a - mean.a) for p, c in zip(shares(kept).tolist(), kept)]


def aggregate(contributions: Iterable[Contribution], rank: int | None = None) -> Exact:
    """Return factors and residual in float64; `rank` truncates the residual, None keeps all (N - 1) r of it.

    Raises ConfigError for mixed ranks or scales.
    """
    kept = canonical(contributions)
    require_equal("fedex", kept)
    mean = fedit.aggregate(kept)
    full = (len(kept) - 1) * len(kept[0].a)
    if full == 0:
        # The mean of one site differs from it by rounding only: say zero instead.
        empty = Factors(np.zeros((0, mean.a.shape[1])), np.zeros((mean.b.shape[0], 0)))
        return Exact(Factors(kept[0].a, kept[0].b), empty, 0.0)
    low = qr_svd(residual_terms(kept, mean), full if rank is None else min(rank, full))
    return Exact(mean, Factors(low.a, low.b), low.tail)


def fold(weight: np.ndarray, residual: Factors, fan_in_fan_out: bool = False) -> np.ndarray:
    """Return weight + D_res, kept in float32 or wider: repeated bfloat16 additions lose the low bits."""
    wide = np.promote_types(np.float32, weight.dtype) if weight.dtype.kind == "f" else np.dtype(np.float32)
    return (weight.astype(np.float64) + orient(residual.b @ residual.a, fan_in_fan_out)).astype(wide)
