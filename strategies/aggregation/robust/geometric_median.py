"""Geometric median by the smoothed Weiszfeld iteration.

    z = argmin_z sum_i w_i |x_i - z|;      c_i <- w_i / max(nu, |x_i - z|), normalised;   z = sum_i c_i x_i

Pillutla, Kakade, Harchaoui 2022 (RFA), arXiv 1912.13445. z is always a convex combination of the rows, so the
iteration runs on the n x n distances alone and touches the vectors only at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategies.aggregation.robust.common import (
    RobustResult,
    check_rows,
    combine,
    discarded,
    require_sites,
    shares,
)
from strategies.aggregation.robust.distance import (
    central_row,
    distances_to_combination,
    squared_distances,
)

TINY = 1e-300  # keeps smoothing = 0 from dividing by zero


def geometric_median_coefficients(
    squared: np.ndarray,
    weights: Sequence[float] | None = None,
    *,
    smoothing: float | None = None,
    max_iterations: int = 2000,
    tolerance: float = 1e-10,
) -> np.ndarray:
    """Return c [n], sum 1, from squared distances [n, n].

    `smoothing` is nu, in the unit of the distances; None takes 1e-6 of the distance within which the
    densest row has half of all rows.
    """
    given = shares(weights, len(squared))
    origin, spread = central_row(squared)
    # A majority of equal rows has no spread; it is the median then, whatever the others do.
    floor = 1e-6 * spread if spread > 0 else 1e-15 * float(np.sqrt(squared.max()))
    nu = floor if smoothing is None else smoothing
    coefficients = given
    if not squared.any():
        return coefficients
    for _ in range(max_iterations):
        pull = given / np.maximum(distances_to_combination(squared, coefficients, origin), max(nu, TINY))
        updated = pull / pull.sum()
        # Relative: the tiny coefficient of a far-away row matters as much as its distance is large.
        if (np.abs(updated - coefficients) <= tolerance * coefficients).all():
            return updated
        coefficients = updated
    return coefficients


def geometric_median(
    rows: Sequence[np.ndarray],
    num_byzantine: int = 0,
    weights: Sequence[float] | None = None,
    *,
    smoothing: float | None = None,
    max_iterations: int = 2000,
) -> RobustResult:
    """Geometric median of n rows [d]. Raises ConfigError if n < 2f + 1."""
    require_sites("geometric_median", len(rows), num_byzantine, max(1, 2 * num_byzantine + 1))
    checked, given = check_rows(rows), shares(weights, len(rows))
    effective = geometric_median_coefficients(
        squared_distances(checked), weights, smoothing=smoothing, max_iterations=max_iterations
    )
    return RobustResult(combine(checked, effective), effective, discarded(given, effective))
