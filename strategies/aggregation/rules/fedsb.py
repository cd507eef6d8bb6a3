"""Fed-SB: only a small core M [r, r] between frozen B and A is trained and averaged.

    D = s B M A,   M = sum p_i M_i      exact, linear, r^2 numbers a layer

Singhal et al. 2025, arXiv 2502.15436. B and A come from an SVD of an estimated first gradient and depend on
data: they are shipped, not drawn from a seed, and the estimate must itself be federated. Smaller sites train
the leading block M[:r_i, :r_i]; an entry is averaged over the sites that have it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strategies.aggregation.mean import check_weight
from strategies.aggregation.rules import sums
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Factors

CAPABILITIES = Capabilities(
    heterogeneous_rank=True,
    secure_sums=True,
    server_optimizer=True,
    dp_linear=True,
    exact=True,
    joiner_needs="A, B (shipped), M",
    note="ranks nest: a smaller site trains the leading block",
)


def summand(weight: float, core: np.ndarray, rank: int) -> sums.Total:
    """Return what one site adds: its weight, w M padded to [rank, rank], and w where M has entries."""
    padded, covered = np.zeros((rank, rank)), np.zeros((rank, rank))
    own = len(core)
    padded[:own, :own], covered[:own, :own] = core, 1.0
    return sums.summand(weight, {"M": padded, "covered": covered})


def from_total(total: sums.Total, previous: np.ndarray) -> np.ndarray:
    """Return the mean core; entries that nobody sent keep their value."""
    covered = total["covered"]
    return np.where(covered > 0, total["M"] / np.where(covered > 0, covered, 1.0), previous)


def aggregate(previous: np.ndarray, contributions: Iterable[tuple[str, float, np.ndarray]]) -> np.ndarray:
    """Return M [r, r] in float64 from (site, weight, M_i [r_i, r_i]), summed in site order."""
    kept = sorted((c for c in contributions if check_weight(c[1]) > 0), key=lambda c: c[0])
    return from_total(sums.add(summand(weight, core, len(previous)) for _, weight, core in kept), previous)


def export(core: np.ndarray, frozen: Factors) -> Factors:
    """Return a plain adapter of the same scale: (A, B M)."""
    return Factors(frozen.a, frozen.b @ core)
