"""A secret cut into shares of which any t give it back and any t - 1 say nothing.

    f(x) = secret + a_1 x + .. + a_{t-1} x^{t-1}  mod p        share of point x: f(x), x >= 1
    secret = sum_i f(x_i) prod_{j != i} x_j / (x_j - x_i)  mod p

(Shamir 1979, "How to share a secret".) p = 2^521 - 1, so that 256-bit secrets fit; the a_i come from the operating
system. Shares are not authenticated here: whoever combines them must be able to recognise the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from compression.errors import FrameError

PRIME = (1 << 521) - 1
SECRET_BYTES = 32
SHARE_BYTES = 66


def split(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, int]:
    """Return one share for each point (distinct integers >= 1). `secret` is 32 bytes."""
    points = list(points)
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(points):
        raise ValueError(f"a secret of {len(secret)} bytes, {threshold} of {len(points)} shares")
    if len(set(points)) != len(points) or min(points) < 1:
        raise ValueError("points must be distinct integers >= 1")
    terms = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]

    def at(x: int) -> int:
        value = 0
        for term in reversed(terms):
            value = (value * x + term) % PRIME
        return value

    return {x: at(x) for x in points}


def combine(shares: Mapping[int, int], threshold: int) -> bytes:
    """Return the secret from at least `threshold` shares; raises FrameError when they cannot be of one secret."""
    if len(shares) < threshold:
        raise FrameError("shares", f"{len(shares)} shares, {threshold} are needed")
    chosen = sorted(shares)[:threshold]
    total = 0
    for i in chosen:
        above = below = 1
        for j in chosen:
            if j != i:
                above, below = above * j % PRIME, below * (j - i) % PRIME
        total = (total + shares[i] * above * pow(below, -1, PRIME)) % PRIME
    if total >> (8 * SECRET_BYTES):
        raise FrameError("shares", "the shares do not fit together")
    return total.to_bytes(SECRET_BYTES, "big")
