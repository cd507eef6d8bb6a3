"""raFLoRA: average singular directions only over the sites that have them.

    ranks rho_1 < .. < rho_M,  blocks I_m = (rho_{m-1}, rho_m] T = sum_m sum_{i: r_i >= rho_m} (p_i / sum_{j:
    r_j >= rho_m} p_j) s_i B_i[:, I_m] A_i[I_m, :];   qr_svd(T, r_i)

arXiv 2602.13486, reconstructed from its abstract. Plain averaging lets the
energy of mixed-rank federations collapse into the smallest shared rank; here a direction is not diluted by
sites that cannot represent it. The target is T, not the ideal mean: the distance to that is reported, not
promised. Equal ranks give FlexLoRA.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strategies.aggregation.products import Term, qr_svd
from strategies.aggregation.rules import flexlora
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Contribution, canonical

CAPABILITIES = Capabilities(
    heterogeneous_rank=True, stale_updates=False, joiner_needs="factors at its rank", note="target is T"
)


def partitioned_terms(contributions: Iterable[Contribution]) -> list[Term]:
    """Return T as terms. Directions are taken as received: sites start from an ordered basis."""
    kept = canonical(contributions)
    terms: list[Term] = []
    start = 0
    for stop in sorted({len(c.a) for c in kept}):
        members = [c for c in kept if len(c.a) >= stop]
        total = sum(c.weight for c in members)
        terms += [(c.weight / total * c.scale, c.b[:, start:stop], c.a[start:stop]) for c in members]
        start = stop
    return terms


def aggregate(
    contributions: Iterable[Contribution],
    targets: Iterable[flexlora.Target],
    previous_b: np.ndarray | None = None,
) -> dict[flexlora.Target, flexlora.Redistributed]:
    """Return float64 factors for every target; `tail` is relative to T."""
    return flexlora.redistribute(partitioned_terms(contributions), targets, previous_b)


def order_directions(contribution: Contribution) -> Contribution:
    """Return the same update in its own singular basis, for a site whose training mixed the directions."""
    low = qr_svd([(1.0, contribution.b, contribution.a)], len(contribution.a))
    return contribution._replace(a=low.a, b=low.b)
