"""Krum and multi-Krum: keep the m updates with the nearest neighbours.

    score_i = sum of the n - f - 2 smallest |x_i - x_j|^2 over j != i;   mean of the m lowest scores

Blanchard et al. 2017 (NeurIPS, "Machine learning with adversaries"); needs n >= 2f + 3. m = 1 is Krum, the
default here is m = n - f, which for f = 0 is the plain mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key, partial

import numpy as np

from strategies.aggregation.robust.common import (
    RobustResult,
    check_rows,
    combine,
    discarded,
    require_sites,
    shares,
)
from strategies.aggregation.robust.distance import squared_distances
from umbel.errors import ConfigError


def krum_selection(
    squared: np.ndarray,
    num_byzantine: int,
    num_selected: int | None = None,
    order: Sequence[int] | None = None,
) -> np.ndarray:
    """Return the indices kept, ascending, from squared distances [n, n].

    Equal scores (two mutual nearest neighbours always tie) are taken in `order`, by default that of the rows.
    Raises ConfigError if n < 2f + 3 or num_selected is not in 1 .. n - f.
    """
    num = len(squared)
    require_sites("krum", num, num_byzantine, 2 * num_byzantine + 3)
    keep = num - num_byzantine if num_selected is None else num_selected
    if not 1 <= keep <= num - num_byzantine:
        raise ConfigError(
            "krum.num_selected", "is out of range", got=keep, allowed=f"1 .. {num - num_byzantine}"
        )
    # Column 0 of the sorted row is the distance to itself.
    scores = np.sort(squared, axis=1)[:, 1 : num - num_byzantine - 1].sum(axis=1)
    ranked = np.asarray(range(num) if order is None else order)
    return np.sort(ranked[np.argsort(scores[ranked], kind="stable")][:keep])


def krum(rows: Sequence[np.ndarray], num_byzantine: int) -> RobustResult:
    """Return the one row with the lowest score."""
    return multi_krum(rows, num_byzantine, num_selected=1)


def multi_krum(
    rows: Sequence[np.ndarray],
    num_byzantine: int,
    num_selected: int | None = None,
    weights: Sequence[float] | None = None,
) -> RobustResult:
    """Return the (weighted) mean of the selected rows [d]; weights do not enter the selection.

    Ties go to the row that is smaller at the first coordinate where they differ, so that the order of the
    sites does not decide.
    """
    require_sites("krum", len(rows), num_byzantine, 2 * num_byzantine + 3)
    checked, given = check_rows(rows), shares(weights, len(rows))
    order = sorted(range(len(checked)), key=cmp_to_key(partial(_compare, checked)))
    selected = krum_selection(squared_distances(checked), num_byzantine, num_selected, order)
    effective = np.zeros(len(checked))
    effective[selected] = given[selected]
    # All selected sites claiming weight zero leaves nothing to weigh by: count them equally.
    total = effective.sum()
    effective[selected] = effective[selected] / total if total > 0 else 1.0 / len(selected)
    return RobustResult(combine(checked, effective), effective, discarded(given, effective))


def _compare(rows: list[np.ndarray], i: int, j: int) -> int:
    first, second = rows[i], rows[j]
    where = np.flatnonzero(first != second)[:1]
    if not where.size:
        return 0
    return -1 if first[where[0]] < second[where[0]] else 1
