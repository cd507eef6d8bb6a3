"""FedIT: average the factors.

    A = sum p_i A_i,  B = sum p_i B_i
    D*/s - B A = sum p_i (B_i - B)(A_i - A)        the covariance that this rule ignores

Zhang et al. 2023, arXiv 2305.05644. Small error while sites stay near their common start, growing with drift;
the certificate states it. Needs one rank and one scale. This is the plain baseline and the negative control.
"""

from __future__ import annotations

from collections.abc import Iterable

from strategies.aggregation.rules import sums
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Contribution, Factors, canonical, require_equal

CAPABILITIES = Capabilities(
    secure_sums=True,
    server_optimizer=True,
    dora="average",
    joiner_needs="A, B",
    note="under DP the noise of A and B multiplies",
)


def summand(contribution: Contribution) -> sums.Total:
    """Return what one site adds to the total: its weight, w A and w B."""
    return sums.summand(contribution.weight, {"A": contribution.a, "B": contribution.b})


def from_total(total: sums.Total) -> Factors:
    """Return the mean factors."""
    return Factors(sums.mean(total, "A"), sums.mean(total, "B"))


def aggregate(contributions: Iterable[Contribution]) -> Factors:
    """Return (A, B), float64, at the common scale. Raises ConfigError for mixed ranks or scales."""
    kept = canonical(contributions)
    require_equal("fedit", kept)
    return from_total(sums.add(map(summand, kept)))
