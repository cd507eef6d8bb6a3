"""Tables for the range asymmetric numeral system (rANS): 8 lanes, 32-bit states, 12-bit probabilities.

    encode s:  if x >= f << 20: emit x & 0xffff, x >>= 16        x = (x // f << 12) + x % f + c
    decode:    slot = x & 4095 names s;  x = f (x >> 12) + slot - c;  if x < 2^16: x = x << 16 | next word

States start at 2^16 and must be back there after decoding. Symbol i belongs to lane i mod 8; all lanes
share one stream of 16-bit words. Frequencies sum to 2^12 and every used symbol has at least 1. A table
travels per block as u8 lowest, u8 highest, u16 frequency for each symbol between. Reference: Duda 2013;
Giesen 2014 (interleaving).
"""

from __future__ import annotations

import numpy as np

from compression.errors import FrameError

LANES = 8
START = 1 << 16
TOTAL = 1 << 12


def normalise(counts: np.ndarray) -> np.ndarray:
    """(256,) counts, at least one positive -> (256,) frequencies that sum to 4096, int64. Integer
    arithmetic only."""
    total = int(counts.sum())
    freqs = np.where(counts > 0, np.maximum((counts.astype(np.int64) * TOTAL + total // 2) // total, 1), 0)
    excess = int(freqs.sum()) - TOTAL
    while excess:
        largest = int(np.argmax(freqs))
        # take from the largest no more than brings it level with an even share, so that none drops to zero
        change = min(excess, max(int(freqs[largest]) // 2, 1)) if excess > 0 else excess
        freqs[largest] -= change
        excess -= change
    return freqs


def starts(freqs: np.ndarray) -> np.ndarray:
    """Cumulative frequencies, exclusive."""
    return np.cumsum(freqs) - freqs


def write_table(freqs: np.ndarray) -> np.ndarray:
    """Frequencies -> uint16 words: lowest | highest << 8, then one word a symbol."""
    used = np.flatnonzero(freqs)
    low, high = int(used[0]), int(used[-1])
    return np.concatenate([[low | high << 8], freqs[low : high + 1]]).astype("<u2")


def read_table(words: np.ndarray) -> tuple[np.ndarray, int]:
    """uint16 words -> (frequencies (256,) int64, number of words read). Raises FrameError on an illegal
    table."""
    if words.size < 1:
        raise FrameError("rans_table", "missing")
    low, high = int(words[0]) & 255, int(words[0]) >> 8
    length = high - low + 1
    if length < 1 or words.size < 1 + length:
        raise FrameError("rans_table", "truncated")
    freqs = np.zeros(256, np.int64)
    freqs[low : high + 1] = words[1 : 1 + length]
    if int(freqs.sum()) != TOTAL or freqs[low] == 0 or freqs[high] == 0:
        raise FrameError("rans_table", "frequencies do not sum to 4096 between used ends")
    return freqs, 1 + length


def decode_table(freqs: np.ndarray) -> np.ndarray:
    """(4096,) uint32: (f - 1) | (slot - c) << 12 | symbol << 24 for every slot."""
    symbols = np.repeat(np.arange(256), freqs)
    bias = np.arange(TOTAL) - starts(freqs)[symbols]
    return ((freqs[symbols] - 1) | (bias << 12) | (symbols << 24)).astype(np.uint32)


def entropy_bits(counts: np.ndarray) -> float:
    """Bits per symbol of the empirical distribution."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())
