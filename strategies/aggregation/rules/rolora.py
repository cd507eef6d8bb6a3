"""RoLoRA: train and average one factor at a time. Exact in every phase, since the other factor is common.

Chen et al. 2025, arXiv 2502.01755. B starts at zero, which makes the gradient of A zero: the first phase
trains B. The phase follows the number of *committed* rounds (after a skipped first round the next one still
trains B) and is stated by the server; sites never compute it. Stale or asynchronous phases do not fit
together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from strategies.aggregation.rules import sums
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Contribution, Factors, canonical, require_equal

CAPABILITIES = Capabilities(
    secure_sums=True,
    server_optimizer=True,
    dp_linear=True,
    exact=True,
    stale_updates=False,
    dora="phases",
    joiner_needs="both factors, the phase",
)
Phase = Literal["A", "B"]


def phase(num_commits: int) -> Phase:
    """Return the factor trained after `num_commits` committed rounds: B, A, B, .."""
    return "B" if num_commits % 2 == 0 else "A"


def summand(contribution: Contribution, trained: Phase) -> sums.Total:
    """Return what one site adds to the total: its weight and the trained factor times it."""
    array = contribution.b if trained == "B" else contribution.a
    return sums.summand(contribution.weight, {trained: array})


def from_total(total: sums.Total, trained: Phase, previous: Factors) -> Factors:
    """Return the mean of the trained factor beside the server's own other factor, which is not touched."""
    if trained == "B":
        return Factors(previous.a, sums.mean(total, "B"))
    return Factors(sums.mean(total, "A"), previous.b)


def aggregate(contributions: Iterable[Contribution], trained: Phase, previous: Factors) -> Factors:
    """Return (A, B); only `trained` of each contribution is read. Raises ConfigError for mixed ranks or scales."""
    kept = canonical(contributions)
    require_equal("rolora", kept)
    return from_total(sums.add(summand(c, trained) for c in kept), trained, previous)
