"""Integers that add exactly under masks: the codec for secure sums.

    site:    q = floor(x / step + u)   (stochastic, unbiased)      r = weight * q  mod 2^m
    server:  sum of all r mod 2^m, read as a signed number, times step

The server announces one step, one largest level, the number of sites and the largest integer weight; m
follows, so that no legal set of inputs can wrap:  2^m > 2 * sites * weight * level.  A site refuses values
beyond the level. There is no entropy coding, no per-site scale and no per-site support, because those do
not add. Masking itself (pairwise keys, dropout shares) is `secure_sum_protocol`; here are only the numbers it
is applied to. Reference: Bonawitz et al. 2017 (secure aggregation in a modular group).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from compression.errors import EncodeError, FrameError
from compression.rng import stream_key, uniform
from umbel.errors import ConfigError


@dataclass(frozen=True)
class SumPlan:
    """What the server announces, the same for all sites. `step` > 0; the others are positive integers."""

    step: float
    max_level: int
    max_sites: int
    max_weight: int = 1

    def __post_init__(self) -> None:
        for name in ("max_level", "max_sites", "max_weight"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"secure_sum.{name}", "is out of range", got=value, allowed="an integer >= 1"
                )
        if not (np.isfinite(self.step) and self.step > 0):
            raise ConfigError(
                "secure_sum.step", "is out of range", got=self.step, allowed="a finite number > 0"
            )
        if self.modulus_bits > 62:
            raise ConfigError(
                "secure_sum",
                "needs more than 62 bits a value",
                got=self.modulus_bits,
                remedy="Announce fewer sites, a smaller weight or a smaller level.",
            )

    @property
    def largest_sum(self) -> int:
        return self.max_level * self.max_sites * self.max_weight

    @property
    def modulus_bits(self) -> int:
        """m: the smallest with 2^m >= 2 * largest_sum + 1, signs included."""
        return (2 * self.largest_sum).bit_length()

    @property
    def mask(self) -> int:
        return (1 << self.modulus_bits) - 1


def residues(x: np.ndarray, plan: SumPlan, *, weight: int = 1, seed: int = 0) -> np.ndarray:
    """One site's contribution, (n,) uint64 below 2^m. Raises EncodeError for NaN, range or weight."""
    if type(weight) is not int or not 1 <= weight <= plan.max_weight:
        raise EncodeError("", f"weight {weight!r} is not an integer in [1, {plan.max_weight}].")
    ratio = np.asarray(x, np.float64).reshape(-1) / plan.step
    if not np.isfinite(ratio).all():
        raise EncodeError("", "a value to be summed is NaN or infinite. Nothing of it is sent.")
    q = np.floor(ratio + uniform(0, ratio.size, stream_key(seed, 0)))
    if ratio.size and np.abs(q).max() > plan.max_level:
        raise EncodeError(
            "", f"a value exceeds {plan.max_level} steps of {plan.step:g}. Clip before summing."
        )
    return (q.astype(np.int64) * weight).view(np.uint64) & np.uint64(plan.mask)


def add(contributions: Iterable[np.ndarray], plan: SumPlan) -> np.ndarray:
    """Sum modulo 2^m, (n,) uint64. Order does not matter; masks that cancel leave no trace."""
    total: np.ndarray | None = None
    for part in contributions:
        total = part.copy() if total is None else (total + part) & np.uint64(plan.mask)
    if total is None:
        raise FrameError("empty", "nothing to sum")
    return total & np.uint64(plan.mask)


def decode_sum(total: np.ndarray, plan: SumPlan) -> np.ndarray:
    """The signed weighted sum in value units, float64. Raises FrameError beyond what legal inputs can
    reach."""
    signed = total.astype(np.int64)
    signed = np.where(signed > plan.mask >> 1, signed - (plan.mask + 1), signed)
    if signed.size and np.abs(signed).max() > plan.largest_sum:
        raise FrameError(
            "range", "the sum lies outside what the announced sites can reach: a mask did not cancel"
        )
    return signed * plan.step


def pack(values: np.ndarray, plan: SumPlan) -> bytes:
    """m bits a value, lowest bit first."""
    planes = (values[:, None] >> np.arange(plan.modulus_bits, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def unpack(data: bytes, numel: int, plan: SumPlan) -> np.ndarray:
    """Inverse of `pack` for a known number of values. Raises FrameError on another length or stray bits."""
    width = plan.modulus_bits
    if len(data) != -(-numel * width // 8):
        raise FrameError("section_size", f"{len(data)} bytes for {numel} values of {width} bits")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[numel * width :].any():
        raise FrameError("padding", "unused bits are not zero")
    weights = np.uint64(1) << np.arange(width, dtype=np.uint64)
    return (bits[: numel * width].reshape(numel, width).astype(np.uint64) * weights).sum(
        axis=1, dtype=np.uint64
    )
