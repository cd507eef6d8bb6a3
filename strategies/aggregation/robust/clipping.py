"""Rules that shorten what is too long: centred clipping, and clipping to the median norm.

    centred:  v <- v + sum_i w_i (x_i - v) min(1, tau / |x_i - v|),  repeated, from v_0
    median:   sum_i w_i x_i min(1, c median_j |x_j| / |x_i|)

Centred clipping: Karimireddy, He, Jaggi 2021, arXiv 2012.10333; v_0 is the last aggregate (or zero), so an
update outside a ball of radius tau around it only pulls by tau. Clipping bounds what a site can add, it
does not find liars: use it on site momentum, and with a clip radius that honest updates mostly meet.
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
    distances_to_combination,
    squared_distances,
    squared_norms,
)
from umbel.errors import ConfigError


def centred_clipping_coefficients(
    squared: np.ndarray, radius: float, weights: Sequence[float] | None = None, num_iterations: int = 1
) -> np.ndarray:
    """Return c [1 + n], sum 1, of the rows (v_0, x_1 .. x_n) from their squared distances [1 + n, 1 + n]."""
    if not radius > 0:
        raise ConfigError(
            "centred_clipping.radius", "is not positive", got=radius, allowed="> 0, may be infinite"
        )
    if num_iterations < 1:
        raise ConfigError(
            "centred_clipping.num_iterations", "is too small", got=num_iterations, allowed=">= 1"
        )
    given = shares(weights, len(squared) - 1)
    coefficients = np.zeros(len(squared))
    coefficients[0] = 1.0
    for _ in range(num_iterations):
        pull = given * _factors(distances_to_combination(squared, coefficients)[1:], radius)
        coefficients = coefficients * (1.0 - pull.sum())
        coefficients[1:] += pull
    return coefficients


def centred_clipping(
    rows: Sequence[np.ndarray],
    radius: float,
    center: np.ndarray | None = None,
    num_byzantine: int = 0,
    weights: Sequence[float] | None = None,
    num_iterations: int = 1,
) -> RobustResult:
    """Centred clipping of n rows [d] around `center` [d] (zero for None). Raises ConfigError if n < 2f + 1.

    An infinite radius gives the mean. The effective weights are those of the sites; what is missing to 1 is
    the center's.
    """
    require_sites("centred_clipping", len(rows), num_byzantine, max(1, 2 * num_byzantine + 1))
    checked = check_rows(rows)
    points = check_rows([np.zeros(len(checked[0])) if center is None else center, *checked])
    coefficients = centred_clipping_coefficients(squared_distances(points), radius, weights, num_iterations)
    effective = coefficients[1:]
    return RobustResult(
        combine(points, coefficients), effective, discarded(shares(weights, len(rows)), effective)
    )


def norm_clip_factors(norms: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """Return min(1, factor * median(norms) / norm_i) [n]; norm zero keeps factor 1."""
    if not factor > 0:
        raise ConfigError(
            "norm_clipping.factor", "is not positive", got=factor, allowed="> 0, may be infinite"
        )
    norms = np.asarray(norms, np.float64)
    return _factors(norms, factor * float(np.median(norms)))


def norm_clipping(
    rows: Sequence[np.ndarray],
    factor: float = 1.0,
    num_byzantine: int = 0,
    weights: Sequence[float] | None = None,
) -> RobustResult:
    """Weighted mean of the deltas [d], each cut to `factor` times the median norm.

    Raises ConfigError if n < 2f + 1. Deltas are measured from the global model, so the rule is equivariant
    under a shift of model and sites together.
    """
    require_sites("norm_clipping", len(rows), num_byzantine, max(1, 2 * num_byzantine + 1))
    checked, given = check_rows(rows), shares(weights, len(rows))
    effective = given * norm_clip_factors(np.sqrt(squared_norms(checked)), factor)
    return RobustResult(combine(checked, effective), effective, discarded(given, effective))


def _factors(lengths: np.ndarray, radius: float) -> np.ndarray:
    # np.divide leaves 1 where nothing is cut, zero lengths included.
    return np.divide(radius, lengths, out=np.ones_like(lengths), where=lengths > radius)
