"""Leases: which blocks of one common corpus a site trains on in a round, as spans of an order both sides know.

    order(epoch) = stable argsort of num_blocks raw 64-bit draws of Philox(seed, "leases", epoch)
    span         = (epoch, first, last)      the blocks order(epoch)[first .. last)

A span of any size is three integers on the wire. Spans that do not overlap name different blocks of an epoch, so the
server keeps its book over spans (`server_app.leases`) and never over blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from umbel.seeds import generator

Span = tuple[int, int, int]


def positions(spans: Iterable[Span], num_blocks: int, *, seed: int) -> np.ndarray:
    """Return the training blocks that `spans` name, int64, in the order they are trained on.

    Raises ValueError for a span outside of its epoch.
    """
    pieces = []
    for epoch, first, last in spans:
        if not (epoch >= 0 and 0 <= first <= last <= num_blocks):
            raise ValueError(f"A span lies within 0..{num_blocks}, got {(epoch, first, last)!r}.")
        pieces.append(_order(num_blocks, seed, epoch)[first:last])
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


@lru_cache(maxsize=4)
def _order(num_blocks: int, seed: int, epoch: int) -> np.ndarray:
    draws = generator(seed, "leases", epoch).bit_generator.random_raw(num_blocks)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order
