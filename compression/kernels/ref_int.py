"""numpy kernels of the integer block codecs: the definition of every byte.

A block's scale is s = absmax / L, rounded up to bf16, so that |x| / s <= L holds without a clamp; the
symbol is round-half-even(x / s), or floor(x / s + u). Symbols of a block are packed by planes: with b bits,
byte j holds the elements j, j + B*b/8, j + 2*B*b/8, ... from the low bits up, two's complement.
"""

from __future__ import annotations

import numpy as np

from compression.finite import first_non_finite
from compression.rng import uniform

_TINY = np.float32(2.0**-126)


def axpy(values: np.ndarray, out: np.ndarray, weight: float) -> None:
    """out (float64) += weight * values (float32), the product in float64."""
    out += values.astype(np.float64) * weight


def all_finite(values: np.ndarray) -> bool:
    """True if no value of a contiguous float32 array is NaN or infinite."""
    return first_non_finite(values) < 0


def int_encode(
    x: np.ndarray,
    block: int,
    bits: int,
    stochastic: bool,
    start: int,
    key: int,
    words: np.ndarray,
    packed: np.ndarray,
) -> int:
    """Encode whole blocks of `x` (float32) into bf16 scale words (uint16) and packed symbols (uint8).

    `start` is the index of x[0] for the counter generator. Returns -1, or 2b when block b holds a
    non-finite value, 2b + 1 when its largest value is too large for the scale.
    """
    blocks = x.reshape(-1, block)
    levels = np.float32((1 << (bits - 1)) - 1)
    biggest = np.abs(blocks).max(axis=1)
    scales = block_scales(biggest, levels)
    with np.errstate(over="ignore"):
        limit = scales * levels
    bad = ~np.isfinite(biggest) | ~np.isfinite(limit)
    if bad.any():
        first = int(np.argmax(bad))
        return 2 * first + int(np.isfinite(biggest[first]))
    words[:] = scales.view(np.uint32) >> np.uint32(16)
    ratio = np.zeros_like(blocks)
    np.divide(blocks, scales[:, None], out=ratio, where=scales[:, None] > 0)
    if stochastic:
        q = np.floor(
            ratio + np.where(scales[:, None] > 0, uniform(start, x.size, key).reshape(ratio.shape), 0)
        )
    else:
        q = np.rint(ratio)
    pack(q.astype(np.int8), bits, packed)
    return -1


def block_scales(biggest: np.ndarray, levels: np.float32) -> np.ndarray:
    """The smallest bf16 s with biggest <= s * levels (exact product), as fp32; 0 where s would not be
    normal."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = ((biggest / levels).astype(np.float32).view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(
            0xFFFF0000
        )
        short = biggest > bits.view(np.float32) * levels  # the division had rounded down
        scales = (bits + np.where(short, np.uint32(0x10000), np.uint32(0))).view(np.float32)
    return np.where(scales < _TINY, np.float32(0), scales)


def pack(q: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """(blocks, B) int8 symbols into uint8, by planes."""
    planes = q.view(np.uint8).reshape(q.shape[0], 8 // bits, -1)
    mask = np.uint8((1 << bits) - 1)
    total = np.zeros((q.shape[0], planes.shape[2]), np.uint8)
    for number in range(8 // bits):
        total |= (planes[:, number] & mask) << np.uint8(number * bits)
    packed[:] = total.reshape(-1)


def unpack(packed: np.ndarray, block: int, bits: int) -> np.ndarray:
    """Inverse of `pack`: (blocks, B) int8."""
    rows = packed.reshape(-1, block * bits // 8)
    mask, sign = np.uint8((1 << bits) - 1), np.uint8(1 << (bits - 1))
    planes = [(rows >> np.uint8(number * bits)) & mask for number in range(8 // bits)]
    return ((np.concatenate(planes, axis=1) ^ sign) - sign).view(np.int8)


def int_decode(packed: np.ndarray, words: np.ndarray, block: int, bits: int, out: np.ndarray) -> int:
    """Decode whole blocks into `out` (float32). Returns -1, or 2b for a bad scale, 2b + 1 for a bad
    symbol."""
    levels = (1 << (bits - 1)) - 1
    q = unpack(packed, block, bits)
    scales = (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        usable = (scales >= _TINY) & np.isfinite(scales * np.float32(levels))
    usable |= (words == 0) & ~q.any(axis=1)
    low = q.min(axis=1) < -levels
    if (low | ~usable).any():
        first = int(np.argmax(low | ~usable))
        return 2 * first + int(usable[first])
    out.reshape(-1, block)[:] = q.astype(np.float32) * scales[:, None]
    return -1


def int8_accumulate(
    packed: np.ndarray, words: np.ndarray, block: int, out: np.ndarray, weight: float
) -> None:
    """out (float64) += weight * decoded, for verified whole int8 blocks."""
    scales = (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    values = packed.view(np.int8).reshape(-1, block).astype(np.float32) * scales[:, None]
    out += values.reshape(-1).astype(np.float64) * weight
