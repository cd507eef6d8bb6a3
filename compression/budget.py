"""From a link and a deadline to a policy: how many bytes may be sent, and which codec loses least within
them.

    budget = goodput * (deadline - predicted compute) - round-trip time * objects * goodput      (bytes)

Goodput is an exponentially weighted mean of the bytes per second of our own frames, one per direction.
`choose` tries the candidates on a sample of the update and takes the least NMSE that fits; a floor keeps
slow sites from being starved of all information. Weighing sites against each other is the server's
business, not done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compression.api import Arrays, decode, encode
from compression.frame import read_header
from compression.layout import Layout, Role, TensorSpec
from compression.policy import travels_exactly

CANDIDATES = ("lossless", "int8(256,rtn)", "int4(64,rtn)", "sign(4096)")
MIN_BITS = 0.05  # floor of the rate: below it an update carries almost nothing, whatever the link
_SAMPLE_BLOCK = 1 << 16


@dataclass
class Goodput:
    """Bytes per second, smoothed; `share` is the weight of the newest observation. None until the first."""

    share: float = 0.5
    bytes_per_second: float | None = None

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Record one finished transfer; zero or negative times are ignored."""
        if seconds <= 0 or num_bytes <= 0:
            return
        rate = num_bytes / seconds
        old = self.bytes_per_second
        self.bytes_per_second = rate if old is None else self.share * rate + (1 - self.share) * old

    def budget_bytes(
        self, seconds_left: float, compute_seconds: float, rtt_seconds: float = 0.0, num_objects: int = 1
    ) -> int | None:
        """Bytes that fit before the deadline; 0 if none do, None while nothing is known about the link."""
        if self.bytes_per_second is None:
            return None
        usable = seconds_left - compute_seconds - rtt_seconds * num_objects
        return max(int(self.bytes_per_second * usable), 0)


@dataclass(frozen=True)
class Choice:
    """A policy with the bits per value and the NMSE it showed on the sample."""

    policy: str
    bits: float
    nmse: float


def choose(arrays: Arrays, layout: Layout, max_bytes: int, *, min_bits: float = MIN_BITS) -> Choice:
    """The policy with the least NMSE whose frame fits `max_bytes` (at least `min_bits` a value are always
    used).

    What travels exactly in every policy is paid for first. Deterministic: the sample is evenly spaced.
    """
    lossy = [e for e in layout.entries if not travels_exactly(e)]
    if not lossy:
        return Choice("exact", 0.0, 0.0)
    fixed = layout.raw_bytes - sum(e.num_bytes for e in lossy) + 512  # 512 covers header and checksum
    bits = max(8 * (max_bytes - fixed) / sum(e.numel for e in lossy), min_bits)
    sample = _sample(arrays, lossy)
    options = [_tried(sample, policy) for policy in (*CANDIDATES, f"ecsq(rate={min(bits, 8.0):.6g})")]
    fitting = [option for option in options if option.bits <= bits * 1.02]
    return min(fitting or options[-1:], key=lambda option: (option.nmse, option.bits))


def _sample(arrays: Arrays, entries: Sequence[TensorSpec], num_blocks: int = 16) -> np.ndarray:
    """About a million values: whole blocks, evenly spaced over every tensor."""
    per_tensor = max(num_blocks // len(entries), 1)
    parts: list[np.ndarray] = []
    for entry in entries:
        flat = np.asarray(arrays[entry.name]).reshape(-1)
        starts = np.linspace(0, max(flat.size - _SAMPLE_BLOCK, 0), per_tensor).astype(int)
        parts.extend(flat[start : start + _SAMPLE_BLOCK].astype(np.float32) for start in np.unique(starts))
    return np.concatenate(parts[: 4 * num_blocks])


def _tried(sample: np.ndarray, policy: str) -> Choice:
    layout = Layout((TensorSpec("sample", sample.shape, "float32", Role.DELTA),))
    frame = encode({"sample": sample}, layout, f"{policy};min=0")
    error = decode(frame, layout)["sample"].astype(np.float64) - sample
    energy = float((sample.astype(np.float64) ** 2).sum())
    nmse = float((error**2).sum()) / energy if energy else 0.0
    body = len(frame) - read_header(frame).body_offset - 8
    return Choice(policy, 8 * body / sample.size, nmse)
