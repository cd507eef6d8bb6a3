"""What all robust rules share: checked rows, blocks of coordinates, the report, the bound on n.

A row is one site's delta (local minus global) as a vector [d]; rows are read in blocks of coordinates and
lifted to float64 block by block, so that n x d in float64 never exists at once.

The report states how much honest work a rule threw away: with given shares w_i (sum 1) and the weight v_i
that site i really got, discarded = sum_i max(0, w_i - v_i). On non-IID data such rules drop minorities
without any adversary, so this number belongs in every round's log. None of these rules is proof against
back-doors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from strategies.aggregation.errors import UpdateError
from umbel.errors import ConfigError

# Coordinates handled at a time: n rows of 512 KiB in float64.
BLOCK = 1 << 16


class RobustResult(NamedTuple):
    """`value` [d] float64; `effective_weights` [n], v_i above; `discarded_share` in [0, 1]."""

    value: np.ndarray
    effective_weights: np.ndarray
    discarded_share: float


def check_rows(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the rows as 1-D arrays of one length; raises UpdateError naming the row that is wrong."""
    checked = [np.asarray(row) for row in rows]
    for index, row in enumerate(checked):
        if row.ndim != 1 or row.shape != checked[0].shape:
            raise UpdateError(
                f"row {index}", "has the wrong shape", got=row.shape, allowed="one vector length"
            )
        if not np.isfinite(row).all():
            raise UpdateError(f"row {index}", "holds a NaN or an infinite value", allowed="finite values")
    return checked


def require_sites(rule: str, num_sites: int, num_byzantine: int, bound: int) -> None:
    """Raise ConfigError unless 0 <= num_byzantine and num_sites >= bound (the rule's minimum for that f)."""
    if num_byzantine < 0:
        raise ConfigError(f"{rule}.num_byzantine", "is negative", got=num_byzantine, allowed=">= 0")
    if num_sites < bound:
        raise ConfigError(
            f"{rule}.num_byzantine",
            f"needs at least {bound} sites for f = {num_byzantine}",
            got=num_sites,
            allowed=f">= {bound} accepted updates",
            remedy="Lower num_byzantine, raise the quorum, or use another rule.",
        )


def shares(weights: Sequence[float] | None, num_sites: int) -> np.ndarray:
    """Return weights divided by their sum, equal ones for None; raises UpdateError for unusable ones."""
    if weights is None:
        return np.full(num_sites, 1.0 / num_sites)
    array = np.asarray(weights, dtype=np.float64)
    if array.shape != (num_sites,) or not np.isfinite(array).all() or (array < 0).any() or array.sum() <= 0:
        raise UpdateError(
            "weights", "are not usable", got=weights, allowed=f"{num_sites} finite numbers >= 0"
        )
    return array / array.sum()


def discarded(given: np.ndarray, effective: np.ndarray) -> float:
    """Return sum_i max(0, w_i - v_i)."""
    return float(np.maximum(given - effective, 0.0).sum())


def column_blocks(rows: Sequence[np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (slice, float64 [n, <= BLOCK]) over the coordinates."""
    size = len(rows[0])
    for at in range(0, size, BLOCK):
        part = slice(at, min(at + BLOCK, size))
        yield part, np.stack([row[part].astype(np.float64) for row in rows])


def combine(rows: Sequence[np.ndarray], coefficients: np.ndarray) -> np.ndarray:
    """Return sum_i c_i x_i [d] in float64; rows of coefficient zero are not touched."""
    used = [(c, row) for c, row in zip(coefficients, rows) if c != 0.0]
    out = np.zeros(len(rows[0]))
    for at in range(0, len(out), BLOCK):
        part = slice(at, at + BLOCK)
        for c, row in used:
            out[part] += c * row[part].astype(np.float64)
    return out
