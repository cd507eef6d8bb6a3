"""Which rows are held out: decided by the row itself, never by its place in the file.

    u(row) = first 8 bytes of SHA-256(salt || content of the row) / 2^64        held out  <=>  u < fraction

So a row stays on its side when rows are added, removed or shuffled, on every machine; two rows with the same
content land on the same side, also when they differ in an id column. The held-out share is `fraction` on
average, not exactly, and can be empty for a handful of rows. Near-duplicates are not recognised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from umbel.data.formats import row_content
from umbel.errors import ConfigError


def heldout_split(
    rows: Sequence[Mapping[str, Any]], fraction: float, *, salt: str = "umbel", max_heldout: int = 0
) -> tuple[list[int], list[int]]:
    """Return (train indices, held-out indices), both ascending; together every row exactly once.

    max_heldout: at most so many held-out rows (0 = no cap), those with the smallest hash; the others train.
    If the hash would hold out everything, the content with the largest hash trains, so that one row always
    does. Raises ConfigError for a fraction outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise ConfigError(
            "data.heldout-fraction",
            "is out of range",
            got=fraction,
            allowed="[0, 1)",
            remedy="Use 0.1 for 10 %.",
        )
    places = [_place(row, salt) for row in rows]
    limit = int(fraction * 2**64)
    chosen = [place for place in places if place < limit]
    if chosen and len(chosen) == len(places):
        limit = max(chosen)
    if max_heldout > 0:
        limit = min(limit, _cap(places, max_heldout))
    train = [i for i, place in enumerate(places) if place >= limit]
    heldout = [i for i, place in enumerate(places) if place < limit]
    return train, heldout


def _place(row: Mapping[str, Any], salt: str) -> int:
    digest = hashlib.sha256(salt.encode() + b"\x1f" + row_content(row)).digest()
    return int.from_bytes(digest[:8], "big")


def _cap(places: Sequence[int], max_heldout: int) -> int:
    """Return the limit below which at most `max_heldout` places lie; equal places stay together."""
    ordered = sorted(places)
    return ordered[max_heldout] if max_heldout < len(ordered) else 2**64
