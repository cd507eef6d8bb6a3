"""numpy kernels of the dead-zone quantiser and of rANS, and the log histogram behind the rate control."""

from __future__ import annotations

import numpy as np

from compression.rans_tables import LANES, START, starts

HISTOGRAM_BINS = 2048  # exponent and 3 mantissa bits of |x|: 8 bins an octave


def log_histogram(x: np.ndarray, counts: np.ndarray) -> int:
    """Add the bins of |x| (fp32 bits >> 20) to `counts` (2048, int64). Returns -1 or the first non-finite
    index."""
    bins = (x.view(np.uint32) & np.uint32(0x7FFFFFFF)) >> np.uint32(20)
    if bins.max(initial=0) >= 0x7F8:
        return int(np.argmax(bins >= 0x7F8))
    counts += np.bincount(bins, minlength=HISTOGRAM_BINS)
    return -1


def ecsq_quantise(
    x: np.ndarray,
    step: np.float32,
    theta: np.float32,
    symbols: np.ndarray,
    counts: np.ndarray,
    sums: np.ndarray,
) -> int:
    """symbols = 128 + sgn(x) * floor(|x|/step + theta); their counts (256, int64); the sums of the fraction
    of |x|/step + theta in 1/65536, for |q| = 1, 2 and >= 3, added to `sums` (3, int64).

    Returns -1, or 2i when x[i] is not finite, 2i + 1 when its |q| exceeds 127 (any such i of the first bad
    4096).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        t = np.abs(x) / step + theta
    bad = ~(t < np.float32(128))
    if bad.any():
        chunk = int(np.argmax(bad)) // 4096 * 4096
        part = t[chunk : chunk + 4096]
        infinite = ~np.isfinite(x[chunk : chunk + 4096])
        if infinite.any():
            return 2 * (chunk + int(np.argmax(infinite)))
        return 2 * (chunk + int(np.argmax(~(part < np.float32(128))))) + 1
    size = t.astype(np.int32)
    fraction = ((t - size.astype(np.float32)) * np.float32(65536)).astype(np.int32).astype(np.int64)
    symbols[:] = 128 + np.where(x < 0, -size, size)
    counts += np.bincount(symbols, minlength=256)
    sums += [fraction[size == 1].sum(), fraction[size == 2].sum(), fraction[size >= 3].sum()]
    return -1


def lookup(symbols: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """out = table[symbols] (float32)."""
    out[:] = table[symbols]


def rans_encode(symbols: np.ndarray, freqs: np.ndarray, states: np.ndarray, words: np.ndarray) -> int:
    """Encode uint8 symbols into the end of `words` (uint16, at least one a symbol); returns the first word
    used.

    `states` (8, uint32) receives the final states, with which the decoder starts.
    """
    f_of, c_of = freqs.astype(np.uint64), starts(freqs).astype(np.uint64)
    x = np.full(LANES, START, np.uint64)
    position = words.size
    for first in range((symbols.size - 1) // LANES * LANES, -1, -LANES):
        group = symbols[first : first + LANES]
        f, c, lanes = f_of[group], c_of[group], x[: group.size]
        emit = lanes >= f << np.uint64(20)
        count = int(emit.sum())
        words[position - count : position] = (lanes & np.uint64(0xFFFF))[emit]
        position -= count
        lanes = np.where(emit, lanes >> np.uint64(16), lanes)
        x[: group.size] = ((lanes // f) << np.uint64(12)) + lanes % f + c
    states[:] = x
    return position


def rans_decode(
    words: np.ndarray, states: np.ndarray, table: np.ndarray, values: np.ndarray, out: np.ndarray
) -> int:
    """Decode out.size symbols and look each up in `values` (256, float32) into `out`.

    Returns the number of words read, or -1 when the stream is too short or the lanes do not end where they
    began.
    """
    x = states.astype(np.uint64)
    if (x < START).any():
        return -1
    position = 0
    mask = np.uint64(0xFFF)
    for first in range(0, out.size, LANES):
        width = min(LANES, out.size - first)
        entry = table[(x[:width] & mask).astype(np.int64)].astype(np.uint64)
        lanes = ((entry & mask) + np.uint64(1)) * (x[:width] >> np.uint64(12))
        lanes += (entry >> np.uint64(12)) & mask
        need = lanes < START
        count = int(need.sum())
        if position + count > words.size:
            return -1
        lanes[need] = (lanes[need] << np.uint64(16)) | words[position : position + count]
        position += count
        x[:width] = lanes
        out[first : first + width] = values[(entry >> np.uint64(24)).astype(np.int64)]
    return position if (x == START).all() else -1
