"""The counter generator: random numbers as a pure function of (seed, element index), the same on every
backend.

    key  = low 32 bits of splitmix64(seed, stream)          Steele, Lea, Flood 2014
    h(i) = mix32(i XOR key)                                 a 32-bit multiply-xorshift finaliser
    u(i) = (2 * (h >> 16) + 1) / 2^17   in (0, 1)

Only 16 bits of h become u: then q + u is exact in fp32 for |q| <= 127 and a stochastic rounding can never
step past its last level. The price is a bias of at most 2^-17 of a step. No framework's generator is
involved.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """One splitmix64 step of a 64-bit integer."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, stream: int) -> int:
    """A 64-bit key for one numbered stream of a seed."""
    return splitmix64(splitmix64(seed & _MASK) ^ (stream * 0xD1B54A32D192ED03 & _MASK))


def hash32(index: np.ndarray, key: int) -> np.ndarray:
    """mix32(index XOR key) of uint32 indices, uint32."""
    h = index.astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return h


def uniform(start: int, count: int, key: int) -> np.ndarray:
    """u for elements start .. start+count-1, float32 in (0, 1)."""
    index = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32)
    high = hash32(index, key) >> np.uint32(16)
    return (high.astype(np.float32) * np.float32(2) + np.float32(1)) * np.float32(2.0**-17)
