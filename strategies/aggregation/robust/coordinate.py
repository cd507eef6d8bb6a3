"""Coordinate-wise rules: trimmed mean and median.

    trimmed mean: per coordinate drop the f smallest and the f largest values, average the other n - 2f
    median:       the same with f = floor((n - 1) / 2)

Yin et al. 2018, arXiv 1803.01498. Both ignore weights: a weight a site claims would be one more thing to
forge. They need coordinates with a common meaning, so never use them on LoRA factors of different gauges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategies.aggregation.robust.common import (
    RobustResult,
    check_rows,
    column_blocks,
    discarded,
    require_sites,
)


def trimmed_mean(rows: Sequence[np.ndarray], num_byzantine: int) -> RobustResult:
    """Trimmed mean of n rows [d]; f = 0 is the plain mean. Raises ConfigError if n < 2f + 1."""
    require_sites("trimmed_mean", len(rows), num_byzantine, 2 * num_byzantine + 1)
    return _middle(check_rows(rows), num_byzantine)


def coordinate_median(rows: Sequence[np.ndarray], num_byzantine: int = 0) -> RobustResult:
    """Median per coordinate, for even n the mean of the middle two. Raises ConfigError if n < 2f + 1."""
    require_sites("coordinate_median", len(rows), num_byzantine, max(1, 2 * num_byzantine + 1))
    return _middle(check_rows(rows), (len(rows) - 1) // 2)


def _middle(rows: list[np.ndarray], drop: int) -> RobustResult:
    num, size = len(rows), len(rows[0])
    value, kept = np.empty(size), np.zeros(num)
    for part, block in column_blocks(rows):
        order = np.argsort(block, axis=0, kind="stable")[drop : num - drop]
        # Summed in sorted order: the bits do not depend on the order of the sites.
        value[part] = np.take_along_axis(block, order, axis=0).sum(axis=0) / (num - 2 * drop)
        kept += np.bincount(order.ravel(), minlength=num)
    effective = kept / max(kept.sum(), 1.0)
    return RobustResult(value, effective, discarded(np.full(num, 1.0 / num), effective))
