"""numpy kernels of chunked top-k and of Rice-coded gaps.

Bits are written from the low end of each byte up. A gap g with parameter r is g >> r zeros, a one, the r
low bits of g.
"""

from __future__ import annotations

import numpy as np


def topk_select(x: np.ndarray, block: int, keep: np.ndarray, index: np.ndarray) -> None:
    """Write the indices (uint16, ascending inside a block) of the keep[b] largest |x| of every block b of
    finite x.

    Ties go to the lowest index. `index` has sum(keep) places.
    """
    order = np.argsort(~(x.view(np.uint32) & np.uint32(0x7FFFFFFF)).reshape(-1, block), axis=1, kind="stable")
    place = 0
    for b, count in enumerate(keep):
        index[place : place + count] = np.sort(order[b, :count])
        place += count


def gaps_of(index: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Distance to the previous index of the same block, less one; the first counts from -1."""
    before = np.concatenate([[-1], index[:-1].astype(np.int64)])
    firsts = (np.cumsum(keep) - keep)[keep > 0]
    before[firsts] = -1
    return index.astype(np.int64) - before - 1


def rice_parameter(gaps: np.ndarray) -> int:
    """The r in 0..15 with the fewest bits, the smallest on a tie."""
    costs = [int((gaps >> r).sum()) + gaps.size * (r + 1) for r in range(16)]
    return int(np.argmin(costs))


def rice_encode(gaps: np.ndarray, r: int, out: np.ndarray) -> int:
    """Write the code of all gaps into `out` (uint8, long enough); returns the bytes used."""
    quotient = gaps >> r
    ends = np.cumsum(quotient + 1 + r)
    bits = np.zeros(-(-int(ends[-1]) // 8) * 8 if gaps.size else 0, np.uint8)
    ones = ends - r - 1
    bits[ones] = 1
    for j in range(r):
        bits[ones + 1 + j] = (gaps >> j) & 1
    packed = np.packbits(bits, bitorder="little")
    out[: packed.size] = packed
    return packed.size


def rice_decode(data: np.ndarray, r: int, keep: np.ndarray, limits: np.ndarray, index: np.ndarray) -> int:
    """Read sum(keep) indices; block b's must stay below limits[b]. Returns 0, or -1 on any illegal stream."""
    bits = np.unpackbits(data, bitorder="little")
    ones = np.flatnonzero(bits)
    at, place = 0, 0
    for b, count in enumerate(keep):
        last = -1
        for _ in range(count):
            found = np.searchsorted(ones, at)
            if found == ones.size or ones[found] + r >= bits.size:
                return -1
            stop = int(ones[found])
            low = sum(int(bits[stop + 1 + j]) << j for j in range(r))
            last += ((stop - at) << r) + low + 1
            if last >= limits[b]:
                return -1
            index[place] = last
            place += 1
            at = stop + 1 + r
    return 0 if -(-at // 8) == data.size and not bits[at:].any() else -1


def level_sums(kept: np.ndarray) -> tuple[float, float, float, int]:
    """(fp32 mean of |kept|, sum below it, sum from it up, number from it up), float64 sums in order."""
    size = np.abs(kept).astype(np.float64)
    mean = float(np.float32(_sum(size) / max(size.size, 1)))
    large = size >= mean
    return mean, _sum(size[~large]), _sum(size[large]), int(large.sum())


def _sum(values: np.ndarray) -> float:
    return float(np.cumsum(values)[-1]) if values.size else 0.0  # cumsum adds one by one; sum would not
