"""FedASK: the exact mean of products from sums alone, by a two-stage randomised SVD.

    stage 1:  Y = sum p_i s_i B_i (A_i O)       O [in, k] public, from the round's seed;   Q = qr(Y).Q
    stage 2:  P = sum p_i s_i A_i^T (B_i^T Q)   D ~ Q P^T;  factors from its SVD

arXiv 2507.09990; the range finder is that of Halko, Martinsson, Tropp 2011 (arXiv 0909.4061). Exact for k >= sum of
the ranks; for k = 2.5 r a rank-r result is near the optimum. If sites drop out between the stages, the result is the
exact mean of those that stayed, as long as the ranks of stage 1 add up to no more than `in`: only then does Q span
every site's B and not merely the first sum. A site that joins only stage 2 would break it and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.products import LowRank, qr_svd
from strategies.aggregation.rules import sums
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Contribution, canonical
from umbel.models.seeded import probe

__all__ = [
    "CAPABILITIES",
    "aggregate",
    "basis",
    "check_survivors",
    "first_summand",
    "from_total",
    "probe",
    "second_summand",
]

CAPABILITIES = Capabilities(
    heterogeneous_rank=True,
    secure_sums=True,
    dp_linear=True,
    exact=True,
    stale_updates=False,
    joiner_needs="current factors; the probe follows from the round's seed",
    note="exact for k >= sum of the ranks; one more round trip",
)


def first_summand(contribution: Contribution, omega: np.ndarray) -> sums.Total:
    """Return a site's part of Y [out, k]."""
    sketch = contribution.b.astype(np.float64) @ (contribution.a.astype(np.float64) @ omega)
    return sums.summand(contribution.weight, {"Y": contribution.scale * sketch})


def basis(total: sums.Total) -> np.ndarray:
    """Return Q [out, min(out, k)], orthonormal columns, from the sum of stage 1."""
    return np.linalg.qr(sums.mean(total, "Y"))[0]


def second_summand(contribution: Contribution, q: np.ndarray) -> sums.Total:
    """Return a site's part of P [in, k]."""
    projected = contribution.a.astype(np.float64).T @ (contribution.b.astype(np.float64).T @ q)
    return sums.summand(contribution.weight, {"P": contribution.scale * projected})


def from_total(total: sums.Total, q: np.ndarray, rank: int | None = None) -> LowRank:
    """Return balanced factors of Q P^T at scale 1, cut to `rank` if given."""
    return qr_svd([(1.0, q, sums.mean(total, "P").T)], rank)


def check_survivors(first: Iterable[str], second: Iterable[str]) -> None:
    """Raise UpdateError naming the sites that answered stage 2 without having been in stage 1."""
    strangers = sorted(set(second) - set(first))
    if strangers:
        raise UpdateError(
            "stage 2", "has sites that were not in stage 1", got=strangers, allowed="a subset of it"
        )


def aggregate(
    contributions: Iterable[Contribution],
    omega: np.ndarray,
    rank: int | None = None,
    survivors: Iterable[str] | None = None,
) -> LowRank:
    """Both stages in one place, float64, scale 1; `survivors` are the sites that answered stage 2 (None: all)."""
    kept = canonical(contributions)
    names = {c.site for c in kept}
    stayed = names if survivors is None else set(survivors)
    check_survivors(names, stayed)
    q = basis(sums.add(first_summand(c, omega) for c in kept))
    return from_total(sums.add(second_summand(c, q) for c in kept if c.site in stayed), q, rank)
