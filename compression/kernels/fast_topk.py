"""Compiled kernels of chunked top-k and of Rice-coded gaps. Same bytes as `ref_topk`."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from compression.kernels.jit import kernel

_ABS = np.int32(0x7FFFFFFF)
_L1, _L8, _LFF = np.uint64(1), np.uint64(8), np.uint64(0xFF)


@kernel("void(in:int32, int64, in:int64, uint16[::1])")
def _select(bits, block, keep, index):
    where = np.empty(block + 1, np.uint16)  # one place more: the loop writes first and counts after
    chosen = np.empty(block + 1, np.int32)
    place = 0
    guess = np.int32(0)
    for b in range(keep.size):
        wanted = keep[b]
        if wanted == 0:
            continue
        part = bits[b * block : (b + 1) * block]
        # The last block's threshold, a little lower, usually leaves a few candidates. A wrong guess costs
        # time only.
        floor = np.int32(max(guess - np.int32(1 << 21), np.int32(0)))
        total = 0
        while True:
            count = np.uint64(0)
            for i in range(block):
                size = part[i] & _ABS
                where[count] = np.uint16(i)
                chosen[count] = size
                count = np.uint64(count + np.uint64(size >= floor))
            total = np.int64(count)
            if total >= wanted:
                break
            floor = np.int32(0)
        few = chosen[:total]
        low, high = np.int64(floor), np.int64(0x7F800000)
        while high - low > 1:
            middle = np.int32((low + high) // 2)
            above = 0
            for i in range(total):
                above += few[i] >= middle
            if above >= wanted:
                low = np.int64(middle)
            else:
                high = np.int64(middle)
        threshold = np.int32(low)
        strictly = 0
        for i in range(total):
            strictly += few[i] > threshold
        ties = wanted - strictly
        for i in range(total):
            if few[i] > threshold:
                index[place] = where[i]
                place += 1
            elif few[i] == threshold and ties > 0:
                index[place] = where[i]
                place += 1
                ties -= 1
        guess = threshold


@kernel("int64(in:int64, int64, uint8[::1])")
def rice_encode(gaps, r, out):
    """See `ref_topk.rice_encode`."""
    held, bits, at = np.uint64(0), 0, 0
    low_mask = np.uint64((1 << r) - 1)
    for i in range(gaps.size):
        zeros = gaps[i] >> r
        while zeros > 32:  # flush long runs in pieces that fit the register
            bits += 32
            zeros -= 32
            while bits >= 8:
                out[at] = np.uint8(held & _LFF)
                held = held >> _L8
                at += 1
                bits -= 8
        code = np.uint64(_L1 | np.uint64((np.uint64(gaps[i]) & low_mask) << _L1))
        held = np.uint64(held | np.uint64(code << np.uint64(bits + zeros)))
        bits += zeros + 1 + r
        while bits >= 8:
            out[at] = np.uint8(held & _LFF)
            held = held >> _L8
            at += 1
            bits -= 8
    if bits:
        out[at] = np.uint8(held & _LFF)
        at += 1
    return at


@kernel("int64(in:uint8, int64, in:int64, in:int64, uint16[::1])")
def rice_decode(data, r, keep, limits, index):
    """See `ref_topk.rice_decode`."""
    total = data.size * 8
    at, place = 0, 0
    for b in range(keep.size):
        last = -1
        for _ in range(keep[b]):
            zeros = 0
            while True:
                if at >= total:
                    return -1
                one = (data[at >> 3] >> (at & 7)) & 1
                at += 1
                if one:
                    break
                zeros += 1
            if at + r > total:
                return -1
            low = 0
            for j in range(r):
                low |= np.int64((data[at >> 3] >> (at & 7)) & 1) << j
                at += 1
            last += (zeros << r) + low + 1
            if last >= limits[b]:
                return -1
            index[place] = np.uint16(last)
            place += 1
    if (at + 7) // 8 != data.size:
        return -1
    while at < total:
        if (data[at >> 3] >> (at & 7)) & 1:
            return -1
        at += 1
    return 0


def topk_select(x: np.ndarray, block: int, keep: np.ndarray, index: np.ndarray) -> None:
    """See `ref_topk.topk_select`."""
    _select(x.view(np.int32), block, keep, index)


@kernel("void(in:uint16, in:int64, int64[::1])")
def _gaps(index, keep, gaps):
    place = 0
    for b in range(keep.size):
        last = -1
        for _ in range(keep[b]):
            gaps[place] = np.int64(index[place]) - last - 1
            last = np.int64(index[place])
            place += 1


@kernel("int64(in:int64)")
def rice_parameter(gaps):
    """See `ref_topk.rice_parameter`."""
    best, least = 0, np.int64(1) << 62
    for r in range(16):
        cost = gaps.size * (r + 1)
        for i in range(gaps.size):
            cost += gaps[i] >> r
        if cost < least:
            best, least = r, cost
    return best


@kernel("void(in:float32, float64[::1])")
def _level_sums(kept, sums):
    total = 0.0
    for i in range(kept.size):
        total += np.float64(abs(kept[i]))
    mean = np.float64(np.float32(total / max(kept.size, 1)))
    low, high, num_high = 0.0, 0.0, 0
    for i in range(kept.size):
        size = np.float64(abs(kept[i]))
        if size >= mean:
            high += size
            num_high += 1
        else:
            low += size
    sums[0], sums[1], sums[2], sums[3] = mean, low, high, num_high


def gaps_of(index: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """See `ref_topk.gaps_of`."""
    gaps = np.empty(index.size, np.int64)
    _gaps(index, keep, gaps)
    return gaps


def level_sums(kept: np.ndarray) -> tuple[float, float, float, int]:
    """See `ref_topk.level_sums`."""
    sums = np.empty(4)
    _level_sums(kept, sums)
    return sums[0], sums[1], sums[2], int(sums[3])


__all__ = ["gaps_of", "level_sums", "rice_decode", "rice_encode", "rice_parameter", "topk_select"]
