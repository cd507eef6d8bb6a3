"""Gaussian noise that nobody can draw again, and a reproducible one for tests.

    u, v uniform in (0, 1]      sqrt(-2 log u) cos(2 pi v),  sqrt(-2 log u) sin(2 pi v)

(Box and Muller 1958.) The uniform numbers are 53 bits each from the operating system's generator, so that they are
not a function of anything that is stored, sent or seeded. *Noise from the run's seed is no privacy*: whoever knows
the seed, which travels in every instruction, subtracts it. It exists so that a test can compare two runs bit for bit.

What it does not do: the numbers are floating point, and the tail ends at 8.57 deviations. Attacks on the low bits of
floating-point noise (Mironov 2012) are not defended against; a discrete Gaussian would be needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from umbel.seeds import generator

# (number of values) -> that many standard normal numbers, float64.
Normal = Callable[[int], np.ndarray]

_BLOCK = 1 << 19
_UNIT = 2.0**-53


def system_normal(num: int) -> np.ndarray:
    """Return [num] standard normal numbers, float64, from the operating system's random bytes."""
    out = np.empty(num, np.float64)
    for start in range(0, num, 2 * _BLOCK):
        part = out[start : start + 2 * _BLOCK]
        half = (part.size + 1) // 2
        words = np.frombuffer(os.urandom(16 * half), np.uint64).reshape(2, half)
        # Shifted by one unit: in (0, 1], so that the logarithm is finite.
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 1.0) * _UNIT
        radius, angle = np.sqrt(-2.0 * np.log(uniform[0])), 2.0 * np.pi * uniform[1]
        part[:half] = radius * np.cos(angle)
        part[half:] = (radius * np.sin(angle))[: part.size - half]
    return out


def seeded_normal(seed: int, *parts: str | int) -> Normal:
    """Return a reproducible source for tests, a function of the run's seed and `parts`. No privacy: see above."""
    return generator(seed, "privacy-noise", *parts).standard_normal
