"""Where a site is in its data: an epoch and a position, two integers that survive a restart.

    order(epoch) = stable argsort of num_rows raw 64-bit draws of Philox(seed, "order", site, epoch)

The order of an epoch is a pure function of seed, site and epoch, so any cursor can be resumed at the cost of
one permutation, without replaying what came before. A row never repeats before its epoch ends. Raw draws are
used because numpy promises their stream for ever, and does not promise that of `Generator.permutation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from umbel.errors import DataError
from umbel.seeds import generator


@dataclass(frozen=True)
class Cursor:
    """The next row to read: `position` rows of epoch `epoch` (from 0) are already spent."""

    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.position < 0:
            raise ValueError(f"A cursor has epoch >= 0 and position >= 0, got {self!r}.")


def take(cursor: Cursor, num_rows: int, count: int, *, seed: int, site: str) -> tuple[np.ndarray, Cursor]:
    """Return the next `count` row indices, int64 [count], and the cursor after them.

    Crosses as many epochs as needed, so fewer rows than a batch work. take(a) then take(b) gives the same
    rows and the same cursor as take(a + b). A position beyond the epoch's end (the data shrank) starts the
    next epoch. Raises DataError when there are no rows to take from.
    """
    if count < 0:
        raise ValueError(f"count must be >= 0, got {count!r}.")
    if num_rows <= 0:
        raise DataError(
            f"Site {site!r} has no rows to train on, got {num_rows!r} rows. Check its data source."
        )
    epoch, position = _within(cursor.epoch, cursor.position, num_rows)
    pieces: list[np.ndarray] = []
    missing = count
    while missing > 0:
        piece = _order(num_rows, seed, site, epoch)[position : position + missing]
        pieces.append(piece)
        missing -= len(piece)
        epoch, position = _within(epoch, position + len(piece), num_rows)
    indices = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
    return indices, Cursor(epoch, position)


def _within(epoch: int, position: int, num_rows: int) -> tuple[int, int]:
    return (epoch, position) if position < num_rows else (epoch + 1, 0)


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, site: str, epoch: int) -> np.ndarray:
    draws = generator(seed, "order", site, epoch).bit_generator.random_raw(num_rows)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.flags.writeable = False  # shared by all callers through the cache
    return order
