"""Compiled kernels of sign x mean and of the rotation codecs. Same bytes as `ref_bits`."""

from __future__ import annotations

import numpy as np

from compression.kernels.jit import kernel
from compression.rng import stream_key

_INF, _ABS, _TINY = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF), np.uint32(0x00800000)
_NEG = np.uint32(0x80000000)
_M1, _M2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_U15, _U16, _U31 = np.uint32(15), np.uint32(16), np.uint32(31)
_ONE, _TWO = np.float32(1), np.float32(2)


@kernel("int64(in:float32, in:uint32, int64, in:int64, float32[::1], uint32[::1], uint8[::1])")
def _sign_encode(x, bits, block, counts, means, mean_bits, packed):
    eighth = block // 8
    lanes = np.zeros(16)
    for b in range(means.size):
        part = bits[b * block : (b + 1) * block]
        xb = x[b * block : (b + 1) * block]
        top = np.uint32(0)
        for i in range(block):
            top = max(top, part[i] & _ABS)
        if top >= _INF:
            return b
        lanes[:] = 0.0
        for step in range(block // 16):
            cells = xb[step * 16 : (step + 1) * 16]
            for j in range(16):
                lanes[j] += np.float64(abs(cells[j]))
        width = 8
        while width:
            for j in range(width):
                lanes[j] += lanes[j + width]
            width //= 2
        means[b] = np.float32(lanes[0] / max(counts[b], 1))
        out = packed[b * eighth : (b + 1) * eighth]
        out[:] = np.uint8(0)
        if mean_bits[b] < _TINY:
            means[b] = np.float32(0)
            continue
        for j in range(8):
            plane = part[j * eighth : (j + 1) * eighth]
            for i in range(eighth):
                out[i] |= np.uint8(np.uint8(plane[i] > _NEG) << np.uint8(j))
    return -1


@kernel("int64(in:float32, in:uint32, in:uint8, int64, float32[::1])")
def _sign_decode(means, mean_bits, packed, block, out):
    eighth = block // 8
    for b in range(means.size):
        src = packed[b * eighth : (b + 1) * eighth]
        if mean_bits[b] < _TINY or mean_bits[b] >= _INF:
            some = np.uint8(0)
            for i in range(eighth):
                some |= src[i]
            if mean_bits[b] != 0 or some != 0:
                return b
        mean = means[b]
        for j in range(8):
            ob = out[b * block + j * eighth : b * block + (j + 1) * eighth]
            for i in range(eighth):
                ob[i] = mean * (_ONE - _TWO * np.float32((src[i] >> j) & 1))
    return -1


@kernel("void(float32[::1], uint32, uint32)")
def _flip_signs(y, start, key):
    for i in range(y.size):
        h = np.uint32(np.uint32(start + np.uint32(i)) ^ key)
        h = np.uint32(h ^ np.uint32(h >> _U16))
        h = np.uint32(h * _M1)
        h = np.uint32(h ^ np.uint32(h >> _U15))
        h = np.uint32(h * _M2)
        h = np.uint32(h ^ np.uint32(h >> _U16))
        y[i] = y[i] * (_ONE - _TWO * np.float32(np.int32(h >> _U31)))


@kernel("void(float32[::1], int64, float32)")
def _hadamard(y, block, norm):
    for b in range(y.size // block):
        row = y[b * block : (b + 1) * block]
        stride = block // 2
        while stride >= 8:
            for first in range(0, block, 2 * stride):
                left = row[first : first + stride]
                right = row[first + stride : first + 2 * stride]
                for i in range(stride):
                    u, v = left[i], right[i]
                    left[i] = u + v
                    right[i] = u - v
            stride //= 2
        for first in range(0, block, 8):
            a0, a1, a2, a3 = row[first], row[first + 1], row[first + 2], row[first + 3]
            a4, a5, a6, a7 = row[first + 4], row[first + 5], row[first + 6], row[first + 7]
            b0, b1, b2, b3 = a0 + a4, a1 + a5, a2 + a6, a3 + a7
            b4, b5, b6, b7 = a0 - a4, a1 - a5, a2 - a6, a3 - a7
            c0, c1, c2, c3 = b0 + b2, b1 + b3, b0 - b2, b1 - b3
            c4, c5, c6, c7 = b4 + b6, b5 + b7, b4 - b6, b5 - b7
            row[first], row[first + 1] = (c0 + c1) * norm, (c0 - c1) * norm
            row[first + 2], row[first + 3] = (c2 + c3) * norm, (c2 - c3) * norm
            row[first + 4], row[first + 5] = (c4 + c5) * norm, (c4 - c5) * norm
            row[first + 6], row[first + 7] = (c6 + c7) * norm, (c6 - c7) * norm


@kernel(
    "int64(in:float32, int64, in:float64, in:float64, boolean, float32[::1], uint32[::1], uint8[::1], uint8[::1])"
)
def _lm_encode(y, block, levels, cuts, unbiased, scales, scale_bits, index, packed):
    eighth = block // 8
    num_planes = packed.size // (scales.size * eighth)
    lanes, along, square = np.zeros(16), np.zeros(16), np.zeros(16)
    top_level = np.float32(levels[levels.size - 1])
    cell = np.zeros(16, np.float32)
    for b in range(scales.size):
        yb = y[b * block : (b + 1) * block]
        lanes[:], along[:], square[:] = 0.0, 0.0, 0.0
        for step in range(block // 16):
            cells = yb[step * 16 : (step + 1) * 16]
            for j in range(16):
                lanes[j] += np.float64(cells[j]) * np.float64(cells[j])
        width = 8
        while width:
            for j in range(width):
                lanes[j] += lanes[j + width]
            width //= 2
        energy = lanes[0]
        sigma = np.sqrt(energy / block)
        for c in range(cuts.size):
            cell[c] = np.float32(sigma * cuts[c])
        for i in range(block):
            index[i] = np.uint8(0)
        for c in range(cuts.size):
            cut = cell[c]
            for i in range(block):
                index[i] += np.uint8(abs(yb[i]) >= cut)
        for step in range(block // 16):
            for j in range(16):
                level = levels[index[step * 16 + j]]
                along[j] += np.float64(abs(yb[step * 16 + j])) * level
                square[j] += level * level
        width = 8
        while width:
            for j in range(width):
                along[j] += along[j + width]
                square[j] += square[j + width]
            width //= 2
        if unbiased:
            scales[b] = np.float32(energy / along[0])
        else:
            scales[b] = np.float32(along[0] / square[0])
        out = packed[b * eighth * num_planes : (b + 1) * eighth * num_planes]
        out[:] = np.uint8(0)
        if not np.isfinite(energy):
            return b
        if not (energy > 0 and scale_bits[b] >= _TINY):
            scales[b] = np.float32(0)
            continue
        if not np.isfinite(scales[b] * top_level):
            return b
        for plane in range(num_planes):
            row = out[plane * eighth : (plane + 1) * eighth]
            for j in range(8):
                some = yb[j * eighth : (j + 1) * eighth]
                which = index[j * eighth : (j + 1) * eighth]
                if plane == num_planes - 1:
                    for i in range(eighth):
                        row[i] |= np.uint8(np.uint8(some[i] < 0) << np.uint8(j))
                else:
                    for i in range(eighth):
                        row[i] |= np.uint8(((which[i] >> plane) & 1) << j)
    return -1


@kernel("int64(in:float32, in:uint32, in:uint8, int64, in:float64, float32[::1])")
def _lm_decode(scales, scale_bits, packed, block, levels, out):
    eighth = block // 8
    num_planes = packed.size // (scales.size * eighth)
    top_level = np.float32(levels[levels.size - 1])
    table = np.zeros(16, np.float32)
    for b in range(scales.size):
        src = packed[b * eighth * num_planes : (b + 1) * eighth * num_planes]
        s = scales[b]
        if scale_bits[b] < _TINY or scale_bits[b] >= _INF or not np.isfinite(s * top_level):
            some = np.uint8(0)
            for i in range(src.size):
                some |= src[i]
            if scale_bits[b] != 0 or some != 0:
                return b
        for level in range(levels.size):
            table[level] = np.float32(levels[level]) * s
        last = src[(num_planes - 1) * eighth :]
        for j in range(8):
            ob = out[b * block + j * eighth : b * block + (j + 1) * eighth]
            for i in range(eighth):
                at = 0
                for plane in range(num_planes - 1):
                    at |= ((src[plane * eighth + i] >> j) & 1) << plane
                ob[i] = table[at] * (_ONE - _TWO * np.float32((last[i] >> j) & 1))
    return -1


def sign_encode(x: np.ndarray, block: int, counts: np.ndarray, means: np.ndarray, packed: np.ndarray) -> int:
    """See `ref_bits.sign_encode`."""
    return _sign_encode(x, x.view(np.uint32), block, counts, means, means.view(np.uint32), packed)


def sign_decode(means: np.ndarray, packed: np.ndarray, block: int, out: np.ndarray) -> int:
    """See `ref_bits.sign_decode`."""
    return _sign_decode(means, means.view(np.uint32), packed, block, out)


def _turn_key(seed: int, turn: int) -> np.uint32:
    return np.uint32(stream_key(seed, turn) & 0xFFFFFFFF)


def rotate(x: np.ndarray, block: int, rounds: int, start: int, seed: int) -> np.ndarray:
    """See `ref_bits.rotate`."""
    y = x.copy()
    for turn in range(rounds):
        _flip_signs(y, np.uint32(start & 0xFFFFFFFF), _turn_key(seed, turn))
        _hadamard(y, block, np.float32(block**-0.5))
    return y.reshape(-1, block)


def rotate_back(rows: np.ndarray, rounds: int, start: int, seed: int) -> np.ndarray:
    """See `ref_bits.rotate_back`; works in place."""
    y = rows.reshape(-1)
    for turn in reversed(range(rounds)):
        _hadamard(y, rows.shape[1], np.float32(rows.shape[1] ** -0.5))
        _flip_signs(y, np.uint32(start & 0xFFFFFFFF), _turn_key(seed, turn))
    return rows


def lm_encode(
    y: np.ndarray,
    block: int,
    levels: np.ndarray,
    cuts: np.ndarray,
    unbiased: bool,
    scales: np.ndarray,
    packed: np.ndarray,
) -> int:
    """See `ref_bits.lm_encode`."""
    flat, index = y.reshape(-1), np.empty(block, np.uint8)
    return _lm_encode(flat, block, levels, cuts, unbiased, scales, scales.view(np.uint32), index, packed)


def lm_decode(scales: np.ndarray, packed: np.ndarray, block: int, levels: np.ndarray, out: np.ndarray) -> int:
    """See `ref_bits.lm_decode`."""
    return _lm_decode(scales, scales.view(np.uint32), packed, block, levels, out)
