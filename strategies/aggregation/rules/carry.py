"""Carry: FedEx's exact residual, kept beside the base as a second frozen adapter C.

    equal ranks:  A, B as FedIT;  C' = C + s sum p_i (B_i - B)(A_i - A);  C = qr_svd(C', r_c)
    mixed ranks:  T = sum p_i (s_i B_i A_i + C_i);  U S V^T = qr_svd(T, r_c);
                  site i trains directions 1 .. r_i and carries r_i + 1 .. r_c as its C_i

The effective weight is W + s B A + C with W untouched, so a 4-bit base, a pinned preference reference and a
resume stay as they are. Exact for r_c None (C then grows by (N - 1) r a round); otherwise the error is the
tail of C'. C is float, never quantised, and belongs to the checkpoint. This is Umbel's own variant of arXiv
2410.09432.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from strategies.aggregation.products import Term, norm_of_sum, qr_svd
from strategies.aggregation.rules import fedex, fedit
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Contribution, Factors, canonical, require_equal, shares

CAPABILITIES = Capabilities(
    heterogeneous_rank=True,
    stale_updates=False,
    exact=True,
    joiner_needs="A, B, C",
    note="exact while the rank of C is not cut",
)


class Carried(NamedTuple):
    """Mean factors at the common scale, C at scale 1, and errors of the cut.

    `tail` is relative to C', `relative_error` to the whole ideal update s B A + C'.
    """

    factors: Factors
    carry: Factors
    tail: float
    relative_error: float


class MixedCarry(NamedTuple):
    """Directions of T in order of size at scale 1, and the share of |T| that r_c leaves out."""

    b: np.ndarray
    a: np.ndarray
    relative_error: float


def empty(out: int, inp: int) -> Factors:
    """Return a C of rank zero."""
    return Factors(np.zeros((0, inp)), np.zeros((out, 0)))


def aggregate(contributions: Iterable[Contribution], carry: Factors, max_rank: int | None = None) -> Carried:
    """One round at equal ranks. All sites carried the same C. Raises ConfigError for mixed ranks or scales."""
    kept = canonical(contributions)
    scale = require_equal("carry", kept)
    if len(kept) == 1 and (max_rank is None or len(carry.a) <= max_rank):
        return Carried(Factors(kept[0].a, kept[0].b), carry, 0.0, 0.0)
    mean = fedit.aggregate(kept)
    terms: list[Term] = [(1.0, carry.b, carry.a), *fedex.residual_terms(kept, mean)]
    full = len(carry.a) + (len(kept) - 1) * len(kept[0].a)
    full = min(full, len(mean.b), mean.a.shape[1])
    low = qr_svd(terms, full if max_rank is None else min(max_rank, full))
    dropped = low.tail * float(np.linalg.norm(low.singular_values))
    ideal = norm_of_sum([(scale, mean.b, mean.a), *terms])
    return Carried(mean, Factors(low.a, low.b), low.tail, _ratio(dropped, ideal))


def export(factors: Factors, scale: float, carry: Factors) -> Factors:
    """Return one plain adapter of scale 1 (alpha = rank): B = [B, B_C], A = [s A; A_C]."""
    return Factors(np.concatenate([scale * factors.a, carry.a]), np.concatenate([factors.b, carry.b], axis=1))


def aggregate_mixed(
    contributions: Iterable[Contribution], carries: Mapping[str, Factors], max_rank: int
) -> MixedCarry:
    """One round at mixed ranks; `carries` holds each site's C_i (missing = none)."""
    kept = canonical(contributions)
    terms: list[Term] = []
    for p, c in zip(shares(kept).tolist(), kept):
        terms.append((p * c.scale, c.b, c.a))
        if c.site in carries:
            terms.append((p, carries[c.site].b, carries[c.site].a))
    low = qr_svd(terms, max_rank)
    return MixedCarry(low.b, low.a, low.tail)


def serve_mixed(state: MixedCarry, rank: int, scale: float) -> tuple[Factors, Factors]:
    """Return (trained factors at `scale`, carried factors at scale 1) for a site of this rank."""
    root = math.sqrt(scale)
    trained = Factors(state.a[:rank] / root, state.b[:, :rank] / root)
    return trained, Factors(state.a[rank:], state.b[:, rank:])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
