"""Compiled kernels of the lossless codec. Same bytes as `ref_planes`."""

from __future__ import annotations

import numpy as np

from compression.kernels import ref_planes
from compression.kernels.jit import kernel


@kernel("void(in:uint16, uint8[:, ::1])")
def _split2(word, planes):
    low, high = planes[0], planes[1]
    for i in range(word.size):
        turned = np.uint16((word[i] << 1) | (word[i] >> 15))
        low[i] = np.uint8(turned & 255)
        high[i] = np.uint8(turned >> 8)


@kernel("void(in:uint8, in:uint8, uint16[::1])")
def _join2(low, high, out):
    for i in range(out.size):
        turned = np.uint16(np.uint16(high[i]) << 8 | low[i])
        out[i] = np.uint16((turned >> 1) | (turned << 15))


def split_planes(word: np.ndarray) -> np.ndarray:
    """See `ref_planes.split_planes`."""
    if word.dtype.itemsize != 2:
        return ref_planes.split_planes(word)
    planes = np.empty((2, word.size), np.uint8)
    _split2(word, planes)
    return planes


def join_planes(planes: list[np.ndarray], out: np.ndarray) -> None:
    """See `ref_planes.join_planes`."""
    if out.dtype.itemsize != 2:
        ref_planes.join_planes(planes, out)
    else:
        _join2(planes[0], planes[1], out)
