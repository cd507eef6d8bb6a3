"""Seeds as a pure function of who, what and when, never of a global generator.

`derive_seed(run_seed, "order", site, epoch)` gives the same integer on every machine and Python version, so a
round that is run again after a crash draws exactly what it drew before.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """Return a 63-bit seed: the first 8 bytes of SHA-256 over the run seed and the labelled parts."""
    text = "\x1f".join([str(int(run_seed)), *[f"{type(p).__name__}:{p}" for p in parts]])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(run_seed: int, *parts: str | int) -> np.random.Generator:
    """Return a Philox generator keyed by `derive_seed`: counter based, stable across numpy versions."""
    return np.random.Generator(np.random.Philox(key=derive_seed(run_seed, *parts)))
