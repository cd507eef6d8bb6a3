"""Names for exact bits: what a site and the server compare instead of sending a state again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash


def state_crc(arrays: Mapping[str, np.ndarray]) -> str:
    """Return 32 hex digits naming the exact bits of a set of tensors (xxh3-128).

    Names, dtypes, shapes and bytes enter, in sorted order of names; the layout in memory does not. It guards
    against accidents, not against an attacker: authenticity is the transport's.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        digest.update(f"{name}\x1f{array.dtype.name}\x1f{array.shape}\x1e".encode())
        digest.update(array.reshape(-1).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def short(digest: str) -> str:
    """Return the first 12 characters: enough for a person to compare."""
    return digest[:12]
