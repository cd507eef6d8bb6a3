"""Is every value finite? A bit test in cache-sized pieces, for any float dtype, without an O(n) temporary."""

from __future__ import annotations

import numpy as np

from compression.kernels import kernels

_STEP = 1 << 16
# dtype name -> (unsigned word, mask of the exponent)
_EXPONENT = {
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, 0x7F80_0000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}


def first_non_finite(flat: np.ndarray) -> int:
    """Index of the first NaN or infinity of a contiguous 1-D array, -1 if there is none (or it holds no
    floats)."""
    if flat.dtype.name not in _EXPONENT:
        return -1
    word, mask = _EXPONENT[flat.dtype.name]
    bits, exponent = flat.view(word), word(mask)
    for start in range(0, bits.size, _STEP):
        piece = bits[start : start + _STEP] & exponent
        if piece.max() == exponent:  # an exponent of all ones is NaN or infinity
            return start + int(np.argmax(piece == exponent))
    return -1


def all_finite(flat: np.ndarray) -> bool:
    """As `first_non_finite(flat) < 0`, compiled for long float32 and 16-bit arrays."""
    run_on = kernels(flat.size)
    if hasattr(run_on, "all_finite16") and flat.dtype.name in ("bfloat16", "float16"):
        return run_on.all_finite16(flat.view(np.uint16), _EXPONENT[flat.dtype.name][1])
    if flat.dtype == np.float32:
        return run_on.all_finite(flat)
    return first_non_finite(flat) < 0
