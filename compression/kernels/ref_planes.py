"""numpy kernels of the lossless codec: rotate every word left by one bit and split it into byte planes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split_planes(word: np.ndarray) -> np.ndarray:
    """(n,) uint16 or uint32 -> (itemsize, n) uint8, the exponent's plane last."""
    size = word.dtype.itemsize
    kind = word.dtype.type
    turned = (word << kind(1)) | (word >> kind(8 * size - 1))
    return np.ascontiguousarray(turned.view(np.uint8).reshape(-1, size).T)


def join_planes(planes: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Inverse of `split_planes`, from one array a plane."""
    size = len(planes)
    turned = np.stack(planes, axis=1).reshape(-1).view(out.dtype)
    kind = out.dtype.type
    out[:] = (turned >> kind(1)) | (turned << kind(8 * size - 1))
