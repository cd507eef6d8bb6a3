"""Compiled kernels of the dead-zone quantiser and of rANS. Same bytes as `ref_ecsq`."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import numpy as np

from compression.kernels.jit import kernel
from compression.rans_tables import starts

_INF, _ABS = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)
_U20, _U12, _U16, _U24, _U31 = np.uint32(20), np.uint32(12), np.uint32(16), np.uint32(24), np.uint32(31)
_U44, _L4, _L8, _ONE = np.uint64(44), np.uint64(4), np.uint64(8), np.uint64(1)
_ONE32, _START = np.uint32(1), np.uint32(1 << 16)
_LOW12, _LOW16 = np.uint32(0xFFF), np.uint64(0xFFFF)
_LIMIT, _SCALE = np.float32(128), np.float32(65536)


@kernel("int64(in:uint32, int64[::1])")
def _log_histogram(bits, counts):
    first, second = np.zeros(2048, np.uint32), np.zeros(2048, np.uint32)
    pairs = bits.size // 2
    for i in range(pairs):
        first[(bits[2 * i] & _ABS) >> _U20] += np.uint32(1)
        second[(bits[2 * i + 1] & _ABS) >> _U20] += np.uint32(1)
    if bits.size % 2:
        first[(bits[bits.size - 1] & _ABS) >> _U20] += np.uint32(1)
    for b in range(0x7F8, 2048):
        if first[b] or second[b]:
            for i in range(bits.size):
                if (bits[i] & _ABS) >= _INF:
                    return i
    for b in range(2048):
        counts[b] += np.int64(first[b]) + np.int64(second[b])
    return -1


@kernel("int64(in:float32, in:uint32, float32, float32, uint8[::1], int64[::1], int64[::1])")
def _quantise(x, bits, step, theta, symbols, counts, sums):
    h0, h1, h2, h3 = (
        np.zeros(256, np.uint32),
        np.zeros(256, np.uint32),
        np.zeros(256, np.uint32),
        np.zeros(256, np.uint32),
    )
    for chunk in range(0, x.size, 4096):
        end = min(chunk + 4096, x.size)
        part, xb, sb = bits[chunk:end], x[chunk:end], symbols[chunk:end]
        top = np.uint32(0)
        for i in range(part.size):
            top = max(top, part[i] & _ABS)
        bad = top >= _INF
        if not bad:
            biggest = np.float32(0)
            for i in range(part.size):
                if (part[i] & _ABS) == top:
                    biggest = abs(xb[i])
                    break
            bad = not (biggest / step + theta < _LIMIT)
        if bad:
            for i in range(part.size):
                if (part[i] & _ABS) >= _INF:
                    return 2 * (chunk + i)
            for i in range(part.size):
                if not (abs(xb[i]) / step + theta < _LIMIT):
                    return 2 * (chunk + i) + 1
        s1, s2, s3 = np.int32(0), np.int32(0), np.int32(0)
        for i in range(part.size):  # no branch: masks keep this loop in vector registers
            t = abs(xb[i]) / step + theta
            a = np.int32(t)
            f = np.int32((t - np.float32(a)) * _SCALE)
            s1 = np.int32(s1 + (f & -np.int32(a == 1)))
            s2 = np.int32(s2 + (f & -np.int32(a == 2)))
            s3 = np.int32(s3 + (f & -np.int32(a >= 3)))
            minus = -np.int32(part[i] >> _U31)
            sb[i] = np.uint8(np.int32(128) + ((a ^ minus) - minus))
        sums[0] += s1
        sums[1] += s2
        sums[2] += s3
        quads = part.size // 4
        for i in range(quads):
            h0[sb[4 * i]] += np.uint32(1)
            h1[sb[4 * i + 1]] += np.uint32(1)
            h2[sb[4 * i + 2]] += np.uint32(1)
            h3[sb[4 * i + 3]] += np.uint32(1)
        for i in range(4 * quads, part.size):
            h0[sb[i]] += np.uint32(1)
    for s in range(256):
        counts[s] += np.int64(h0[s]) + np.int64(h1[s]) + np.int64(h2[s]) + np.int64(h3[s])
    return -1


@kernel("void(in:uint8, in:float32, float32[::1])")
def lookup(symbols, table, out):
    """out = table[symbols] (float32)."""
    for i in range(out.size):
        out[i] = table[symbols[i]]


# The eight lanes are written out: in an array they would pass through memory at every step. Positions are
# unsigned,
# which spares a test for negative indices; the encoder always stores a word and moves only if it was due,
# since a
# branch on data would be mispredicted.


@kernel("int64(in:uint8, uint64[:, ::1], uint64[::1], uint16[::1])")
def _rans_encode(symbols, table, x, words):
    n = symbols.size
    position = np.uint64(words.size)
    whole = n // 8 * 8
    for k in range(n - whole):
        lane = n - whole - 1 - k
        e = table[symbols[whole + lane]]
        words[np.uint64(position - _ONE)] = np.uint16(x[lane] & _LOW16)
        due = np.uint64(x[lane] >= e[0])
        position = np.uint64(position - due)
        v = x[lane] >> np.uint64(due << _L4)
        x[lane] = v + e[1] + ((v * e[2]) >> _U44) * e[3]
    x0, x1, x2, x3, x4, x5, x6, x7 = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
    for h in range(whole // 8):
        g = whole // 8 - 1 - h
        row = symbols[g * 8 : g * 8 + 8]
        e = table[row[7]]
        words[np.uint64(position - _ONE)] = np.uint16(x7 & _LOW16)
        due = np.uint64(x7 >= e[0])
        position = np.uint64(position - due)
        x7 = x7 >> np.uint64(due << _L4)
        x7 = x7 + e[1] + ((x7 * e[2]) >> _U44) * e[3]
        e = table[row[6]]
        words[np.uint64(position - _ONE)] = np.uint16(x6 & _LOW16)
        due = np.uint64(x6 >= e[0])
        position = np.uint64(position - due)
        x6 = x6 >> np.uint64(due << _L4)
        x6 = x6 + e[1] + ((x6 * e[2]) >> _U44) * e[3]
        e = table[row[5]]
        words[np.uint64(position - _ONE)] = np.uint16(x5 & _LOW16)
        due = np.uint64(x5 >= e[0])
        position = np.uint64(position - due)
        x5 = x5 >> np.uint64(due << _L4)
        x5 = x5 + e[1] + ((x5 * e[2]) >> _U44) * e[3]
        e = table[row[4]]
        words[np.uint64(position - _ONE)] = np.uint16(x4 & _LOW16)
        due = np.uint64(x4 >= e[0])
        position = np.uint64(position - due)
        x4 = x4 >> np.uint64(due << _L4)
        x4 = x4 + e[1] + ((x4 * e[2]) >> _U44) * e[3]
        e = table[row[3]]
        words[np.uint64(position - _ONE)] = np.uint16(x3 & _LOW16)
        due = np.uint64(x3 >= e[0])
        position = np.uint64(position - due)
        x3 = x3 >> np.uint64(due << _L4)
        x3 = x3 + e[1] + ((x3 * e[2]) >> _U44) * e[3]
        e = table[row[2]]
        words[np.uint64(position - _ONE)] = np.uint16(x2 & _LOW16)
        due = np.uint64(x2 >= e[0])
        position = np.uint64(position - due)
        x2 = x2 >> np.uint64(due << _L4)
        x2 = x2 + e[1] + ((x2 * e[2]) >> _U44) * e[3]
        e = table[row[1]]
        words[np.uint64(position - _ONE)] = np.uint16(x1 & _LOW16)
        due = np.uint64(x1 >= e[0])
        position = np.uint64(position - due)
        x1 = x1 >> np.uint64(due << _L4)
        x1 = x1 + e[1] + ((x1 * e[2]) >> _U44) * e[3]
        e = table[row[0]]
        words[np.uint64(position - _ONE)] = np.uint16(x0 & _LOW16)
        due = np.uint64(x0 >= e[0])
        position = np.uint64(position - due)
        x0 = x0 >> np.uint64(due << _L4)
        x0 = x0 + e[1] + ((x0 * e[2]) >> _U44) * e[3]
    x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7] = x0, x1, x2, x3, x4, x5, x6, x7
    return np.int64(position)


@kernel("int64(in:uint16, uint32[::1], in:uint32, in:float32, float32[::1])")
def _rans_decode(words, x, table, values, out):
    n = out.size
    position, size = np.uint64(0), np.uint64(words.size)
    x0, x1, x2, x3, x4, x5, x6, x7 = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
    done = 0
    for first in range(0, n - 7, 8):
        if position + _L8 > size:
            break
        row = out[first : first + 8]
        e = table[x0 & _LOW12]
        x0 = np.uint32(np.uint32((e & _LOW12) + _ONE32) * (x0 >> _U12) + ((e >> _U12) & _LOW12))
        row[0] = values[e >> _U24]
        w = np.uint32(np.uint32(x0 << _U16) | words[position])
        due = x0 < _START
        position = np.uint64(position + np.uint64(due))
        x0 = w if due else x0
        e = table[x1 & _LOW12]
        x1 = np.uint32(np.uint32((e & _LOW12) + _ONE32) * (x1 >> _U12) + ((e >> _U12) & _LOW12))
        row[1] = values[e >> _U24]
        w = np.uint32(np.uint32(x1 << _U16) | words[position])
        due = x1 < _START
        position = np.uint64(position + np.uint64(due))
        x1 = w if due else x1
        e = table[x2 & _LOW12]
        x2 = np.uint32(np.uint32((e & _LOW12) + _ONE32) * (x2 >> _U12) + ((e >> _U12) & _LOW12))
        row[2] = values[e >> _U24]
        w = np.uint32(np.uint32(x2 << _U16) | words[position])
        due = x2 < _START
        position = np.uint64(position + np.uint64(due))
        x2 = w if due else x2
        e = table[x3 & _LOW12]
        x3 = np.uint32(np.uint32((e & _LOW12) + _ONE32) * (x3 >> _U12) + ((e >> _U12) & _LOW12))
        row[3] = values[e >> _U24]
        w = np.uint32(np.uint32(x3 << _U16) | words[position])
        due = x3 < _START
        position = np.uint64(position + np.uint64(due))
        x3 = w if due else x3
        e = table[x4 & _LOW12]
        x4 = np.uint32(np.uint32((e & _LOW12) + _ONE32) * (x4 >> _U12) + ((e >> _U12) & _LOW12))
        row[4] = values[e >> _U24]
        w = np.uint32(np.uint32(x4 << _U16) | words[position])
        due = x4 < _START
        position = np.uint64(position + np.uint64(due))
        x4 = w if due else x4
        e = table[x5 & _LOW12]
        x5 = np.uint32(np.uint32((e & _LOW12) + _ONE32) * (x5 >> _U12) + ((e >> _U12) & _LOW12))
        row[5] = values[e >> _U24]
        w = np.uint32(np.uint32(x5 << _U16) | words[position])
        due = x5 < _START
        position = np.uint64(position + np.uint64(due))
        x5 = w if due else x5
        e = table[x6 & _LOW12]
        x6 = np.uint32(np.uint32((e & _LOW12) + _ONE32) * (x6 >> _U12) + ((e >> _U12) & _LOW12))
        row[6] = values[e >> _U24]
        w = np.uint32(np.uint32(x6 << _U16) | words[position])
        due = x6 < _START
        position = np.uint64(position + np.uint64(due))
        x6 = w if due else x6
        e = table[x7 & _LOW12]
        x7 = np.uint32(np.uint32((e & _LOW12) + _ONE32) * (x7 >> _U12) + ((e >> _U12) & _LOW12))
        row[7] = values[e >> _U24]
        w = np.uint32(np.uint32(x7 << _U16) | words[position])
        due = x7 < _START
        position = np.uint64(position + np.uint64(due))
        x7 = w if due else x7
        done = first + 8
    x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7] = x0, x1, x2, x3, x4, x5, x6, x7
    for i in range(done, n):
        lane = i % 8
        v = x[lane]
        e = table[v & _LOW12]
        v = np.uint32(np.uint32((e & _LOW12) + _ONE32) * (v >> _U12) + ((e >> _U12) & _LOW12))
        out[i] = values[e >> _U24]
        if v < _START:
            if position >= size:
                return -1
            v = np.uint32(np.uint32(v << _U16) | words[position])
            position = np.uint64(position + _ONE)
        x[lane] = v
    for lane in range(8):
        if x[lane] != _START:
            return -1
    return np.int64(position)


def log_histogram(x: np.ndarray, counts: np.ndarray) -> int:
    """See `ref_ecsq.log_histogram`."""
    return _log_histogram(x.view(np.uint32), counts)


def ecsq_quantise(
    x: np.ndarray,
    step: np.float32,
    theta: np.float32,
    symbols: np.ndarray,
    counts: np.ndarray,
    sums: np.ndarray,
) -> int:
    """See `ref_ecsq.ecsq_quantise`."""
    return _quantise(x, x.view(np.uint32), step, theta, symbols, counts, sums)


def rans_encode(symbols: np.ndarray, freqs: np.ndarray, states: np.ndarray, words: np.ndarray) -> int:
    """See `ref_ecsq.rans_encode`. x // f is (x * ceil(2^44 / f)) >> 44, exact for x < f * 2^20, f <= 2^12."""
    f = freqs.astype(np.uint64)
    used = np.maximum(f, _ONE)
    reciprocal = (np.uint64((1 << 44) - 1) + used) // used
    x = np.full(8, 1 << 16, np.uint64)
    table = np.stack(
        [f << np.uint64(20), starts(freqs).astype(np.uint64), reciprocal, np.uint64(4096) - f], axis=1
    )
    first = _rans_encode(symbols, table, x, words)
    states[:] = x
    return first


def rans_decode(
    words: np.ndarray, states: np.ndarray, table: np.ndarray, values: np.ndarray, out: np.ndarray
) -> int:
    """See `ref_ecsq.rans_decode`."""
    if (states < 65536).any():
        return -1
    return _rans_decode(words, states.astype(np.uint32), table, values, out)
