"""Compiled kernels of the integer block codecs and of weighted addition. Same bytes as `ref_int`."""

from __future__ import annotations

import threading

import numpy as np

from compression.kernels.jit import kernel

_MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds half to even, for |v| < 2^22
_INF, _ABS, _TINY = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF), np.uint32(0x00800000)
_HIGH = np.uint32(0xFFFF0000)
_local = threading.local()
_M1, _M2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_U15, _U16 = np.uint32(15), np.uint32(16)
_ONE, _TWO, _HALF17 = np.float32(1), np.float32(2), np.float32(2.0**-17)

_STATUS = "int64(in:float32, in:uint32, int64, float32, uint16[::1], int8[::1]"


@kernel(f"{_STATUS})")
def _encode(x, bits, block, levels, words, q):
    for b in range(words.size):
        part = bits[b * block : (b + 1) * block]
        xb = x[b * block : (b + 1) * block]
        qb = q[b * block : (b + 1) * block]
        top = np.uint32(0)
        for i in range(block):
            top = max(top, part[i] & _ABS)
        if top >= _INF:
            return 2 * b
        biggest = np.uint32(top).view(np.float32)
        word = np.uint32((np.float32(biggest / levels).view(np.uint32) + np.uint32(0xFFFF)) & _HIGH)
        if biggest > np.uint32(word).view(np.float32) * levels:  # the division had rounded down
            word = np.uint32(word + np.uint32(0x10000))
        if word < _TINY:
            words[b] = np.uint16(0)
            qb[:] = 0
            continue
        s = np.uint32(word).view(np.float32)
        if np.float32(s * levels).view(np.uint32) >= _INF:
            return 2 * b + 1
        words[b] = np.uint16(word >> _U16)
        for i in range(block):
            qb[i] = np.int8(np.int32((xb[i] / s + _MAGIC) - _MAGIC))
    return -1


@kernel(f"{_STATUS}, uint32, uint32)")
def _encode_sr(x, bits, block, levels, words, q, start, key):
    for b in range(words.size):
        part = bits[b * block : (b + 1) * block]
        xb = x[b * block : (b + 1) * block]
        qb = q[b * block : (b + 1) * block]
        top = np.uint32(0)
        for i in range(block):
            top = max(top, part[i] & _ABS)
        if top >= _INF:
            return 2 * b
        biggest = np.uint32(top).view(np.float32)
        word = np.uint32((np.float32(biggest / levels).view(np.uint32) + np.uint32(0xFFFF)) & _HIGH)
        if biggest > np.uint32(word).view(np.float32) * levels:
            word = np.uint32(word + np.uint32(0x10000))
        if word < _TINY:
            words[b] = np.uint16(0)
            qb[:] = 0
            continue
        s = np.uint32(word).view(np.float32)
        if np.float32(s * levels).view(np.uint32) >= _INF:
            return 2 * b + 1
        words[b] = np.uint16(word >> _U16)
        base = np.uint32(start + np.uint32(b * block))
        for i in range(block):
            h = np.uint32(np.uint32(base + np.uint32(i)) ^ key)
            h = np.uint32(h ^ np.uint32(h >> _U16))
            h = np.uint32(h * _M1)
            h = np.uint32(h ^ np.uint32(h >> _U15))
            h = np.uint32(h * _M2)
            h = np.uint32(h ^ np.uint32(h >> _U16))
            u = (np.float32(np.int32(h >> _U16)) * _TWO + _ONE) * _HALF17
            qb[i] = np.int8(np.int32(np.floor(xb[i] / s + u)))
    return -1


@kernel("void(in:int8, int64, uint8[::1])")
def _pack4(q, block, packed):
    half = block // 2
    for b in range(q.size // block):
        low = q[b * block : b * block + half]
        high = q[b * block + half : (b + 1) * block]
        out = packed[b * half : (b + 1) * half]
        for j in range(half):
            out[j] = np.uint8((low[j] & 15) | ((high[j] & 15) << 4))


@kernel("void(in:int8, int64, uint8[::1])")
def _pack2(q, block, packed):
    part = block // 4
    for b in range(q.size // block):
        q0 = q[b * block : b * block + part]
        q1 = q[b * block + part : b * block + 2 * part]
        q2 = q[b * block + 2 * part : b * block + 3 * part]
        q3 = q[b * block + 3 * part : (b + 1) * block]
        out = packed[b * part : (b + 1) * part]
        for j in range(part):
            out[j] = np.uint8((q0[j] & 3) | ((q1[j] & 3) << 2) | ((q2[j] & 3) << 4) | ((q3[j] & 3) << 6))


@kernel("void(in:uint8, int64, int8[::1])")
def _unpack4(packed, block, q):
    half = block // 2
    for b in range(q.size // block):
        low = q[b * block : b * block + half]
        high = q[b * block + half : (b + 1) * block]
        src = packed[b * half : (b + 1) * half]
        for j in range(half):
            low[j] = np.int8(((src[j] & 15) ^ 8) - 8)
            high[j] = np.int8(((src[j] >> 4) ^ 8) - 8)


@kernel("void(in:uint8, int64, int8[::1])")
def _unpack2(packed, block, q):
    part = block // 4
    for b in range(q.size // block):
        q0 = q[b * block : b * block + part]
        q1 = q[b * block + part : b * block + 2 * part]
        q2 = q[b * block + 2 * part : b * block + 3 * part]
        q3 = q[b * block + 3 * part : (b + 1) * block]
        src = packed[b * part : (b + 1) * part]
        for j in range(part):
            q0[j] = np.int8(((src[j] & 3) ^ 2) - 2)
            q1[j] = np.int8((((src[j] >> 2) & 3) ^ 2) - 2)
            q2[j] = np.int8((((src[j] >> 4) & 3) ^ 2) - 2)
            q3[j] = np.int8((((src[j] >> 6) & 3) ^ 2) - 2)


@kernel("int64(in:uint16, in:int8, int64, int64, float32, float32[::1])")
def _decode(words, q, block, lowest, levels, out):
    for b in range(words.size):
        qb = q[b * block : (b + 1) * block]
        least, most = np.int8(0), np.int8(0)
        for i in range(block):
            least = min(least, qb[i])
            most = max(most, qb[i])
        word = np.uint32(np.uint32(words[b]) << _U16)
        s = np.uint32(word).view(np.float32)
        if words[b] == 0:
            if least != 0 or most != 0:
                return 2 * b
        elif word < _TINY or np.float32(s * levels).view(np.uint32) >= _INF:  # also negative ones and NaN
            return 2 * b
        if least <= lowest:
            return 2 * b + 1
        ob = out[b * block : (b + 1) * block]
        for i in range(block):
            ob[i] = np.float32(qb[i]) * s
    return -1


@kernel("void(in:uint16, in:int8, int64, float64[::1], float64)")
def _accumulate8(words, q, block, out, weight):
    for b in range(words.size):
        s = np.uint32(np.uint32(words[b]) << _U16).view(np.float32)
        qb = q[b * block : (b + 1) * block]
        ob = out[b * block : (b + 1) * block]
        for i in range(block):
            ob[i] += weight * np.float64(np.float32(qb[i]) * s)


@kernel("boolean(in:uint32)")
def _all_finite(bits):
    top = np.uint32(0)
    for i in range(bits.size):
        top = max(top, bits[i] & _ABS)
    return top < _INF


def all_finite(values: np.ndarray) -> bool:
    """True if no value of a contiguous float32 array is NaN or infinite."""
    return _all_finite(values.view(np.uint32))


@kernel("boolean(in:uint16, uint16)")
def _all_finite16(words, exponent):
    top = np.uint16(0)
    for i in range(words.size):
        top = max(top, np.uint16(words[i] & exponent))
    return top != exponent


def all_finite16(words: np.ndarray, exponent: int) -> bool:
    """True if no 16-bit float has all bits of the `exponent` mask set."""
    return _all_finite16(words, np.uint16(exponent))


@kernel("void(in:float32, float64[::1], float64)")
def _axpy(values, out, weight):
    for i in range(values.size):
        out[i] += weight * np.float64(values[i])


def _symbols(size: int) -> np.ndarray:
    """A buffer of this thread for the unpacked symbols of one segment; fresh pages cost more than the
    packing."""
    if getattr(_local, "q", np.empty(0)).size < size:
        _local.q = np.empty(size, np.int8)
    return _local.q[:size]


def axpy(values: np.ndarray, out: np.ndarray, weight: float) -> None:
    """out (float64) += weight * values (float32), the product in float64."""
    _axpy(values, out, weight)


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
    """See `ref_int.int_encode`."""
    levels = np.float32((1 << (bits - 1)) - 1)
    q = packed.view(np.int8) if bits == 8 else _symbols(x.size)
    args = (x, x.view(np.uint32), block, levels, words, q)
    if stochastic:
        status = _encode_sr(*args, np.uint32(start & 0xFFFFFFFF), np.uint32(key & 0xFFFFFFFF))
    else:
        status = _encode(*args)
    if bits != 8:
        (_pack4 if bits == 4 else _pack2)(q, block, packed)
    return status


def int_decode(packed: np.ndarray, words: np.ndarray, block: int, bits: int, out: np.ndarray) -> int:
    """See `ref_int.int_decode`."""
    if bits == 8:
        q = packed.view(np.int8)
    else:
        q = _symbols(out.size)
        (_unpack4 if bits == 4 else _unpack2)(packed, block, q)
    levels = (1 << (bits - 1)) - 1
    return _decode(words, q, block, -levels - 1, np.float32(levels), out)


def int8_accumulate(
    packed: np.ndarray, words: np.ndarray, block: int, out: np.ndarray, weight: float
) -> None:
    """See `ref_int.int8_accumulate`."""
    _accumulate8(words, packed.view(np.int8), block, out, weight)
