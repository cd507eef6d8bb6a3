"""What an update must be before a single number of it is added.

Cheap checks first: header, identity of the work, weight, then the frame (size, layout, checksum, finite values),
then its norm against the running median of committed rounds. The first that fails gives a typed reason; the
update is dropped and named, the round goes on. Nothing a site sends can raise out of here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compression import FrameError, Layout
from compression.payload import decode_update as decode_payload
from strategies.aggregation.layers import pair_layers
from strategies.aggregation.products import norm_of_sum
from umbel.messages import STATUS_OK, Reply, parse_json

# Norms of committed updates looked back at, and how few say nothing.
NORM_WINDOW = 64
MIN_NORMS = 4


class Rejected(Exception):
    """An update is not used; `kind` is for counting, `reason` for people. `strike` tells whether the site is to blame."""

    def __init__(self, kind: str, reason: str, *, strike: bool = True) -> None:
        self.kind, self.reason, self.strike = kind, reason, strike
        super().__init__(f"{kind}: {reason}")


@dataclass(frozen=True)
class Expected:
    """What the server asked one site for."""

    run: str
    round: int
    attempt: int
    base: str
    site: str


def check_header(reply: Reply, expected: Expected) -> None:
    """Raise Rejected unless the reply answers exactly what was asked."""
    for field in ("run", "round", "attempt", "base", "site"):
        got, want = getattr(reply, field), getattr(expected, field)
        if got != want:
            raise Rejected("header", f"{field} is {got!r}, asked was {want!r}")
    if reply.status != STATUS_OK:
        raise Rejected(
            reply.status[:32], reply.reason[:400], strike=reply.status in ("non_finite", "exception")
        )


def check_weight(reply: Reply, max_weight: float | None) -> float:
    """Return the weight to use: a finite number > 0, capped at what the site's data can give."""
    weight = reply.weight
    if type(weight) not in (int, float) or not math.isfinite(weight) or weight <= 0:
        raise Rejected("weight", f"weight is {weight!r}, allowed is a finite number > 0")
    if reply.tokens <= 0 or reply.steps <= 0:
        raise Rejected("weight", f"tokens {reply.tokens} and steps {reply.steps} must be > 0")
    if not math.isfinite(reply.loss):
        raise Rejected("non_finite", f"the reported loss is {reply.loss}")
    return min(float(weight), max_weight) if max_weight else float(weight)


def decode_update(
    frame: bytes, layout: Layout, policy: str, base: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Decode and thereby check layout, size, checksum and finiteness; raises Rejected with the frame's code."""
    try:
        return decode_payload(frame, layout, policy, base)
    except FrameError as error:
        raise Rejected("frame", f"{error}") from error
    except (ValueError, TypeError, MemoryError, OverflowError) as error:
        raise Rejected("frame", f"{type(error).__name__}: {error}") from error


def update_norm(
    arrays: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray], scales: Mapping[str, float]
) -> float:
    """Return the L2 norm of the change: of s (B A - B_g A_g) for adapted layers, of the difference elsewhere.

    Norms of the factors themselves depend on the gauge (B R, R^-1 A is the same update) and say nothing.
    """
    pairs = pair_layers(arrays) if scales else {}
    squared = 0.0
    paired = {n for pair in pairs.values() for n in pair}
    for module, (a, b) in pairs.items():
        s = scales[module]
        squared += norm_of_sum([(s, arrays[b], arrays[a]), (-s, state[b], state[a])]) ** 2
    for name, array in arrays.items():
        if name not in paired and array.dtype.kind not in "iub":
            difference = array.astype(np.float64) - state[name].astype(np.float64)
            squared += float(np.vdot(difference, difference))
    return math.sqrt(squared)


def check_norm(norm: float, history: Sequence[float], max_ratio: float) -> None:
    """Raise Rejected when the norm exceeds `max_ratio` times the running median of committed updates."""
    if not math.isfinite(norm):
        raise Rejected("non_finite", "the norm of the update is not finite")
    recent = list(history)[-NORM_WINDOW:]
    if max_ratio <= 0 or len(recent) < MIN_NORMS:
        return
    median = statistics.median(recent)
    if median > 0 and norm > max_ratio * median:
        raise Rejected(
            "norm",
            f"the update's norm {norm:.4g} is more than {max_ratio:g} x the running median {median:.4g}",
        )


def read_metrics(reply: Reply) -> dict[str, Any]:
    """Return the metrics of a reply; what cannot be read is dropped, never the update."""
    try:
        value = parse_json(reply.metrics, "metrics")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read_heldout(metrics: Mapping[str, Any]) -> dict[str, float] | None:
    """Return {'loss_sum', 'tokens', 'correct'} when they are sound numbers, else None."""
    sums = metrics.get("heldout")
    if not isinstance(sums, dict):
        return None
    values = {}
    for key in ("loss_sum", "tokens", "correct"):
        value = sums.get(key)
        # bool is an int to Python and no number to us.
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        if not math.isfinite(value) or value < 0:
            return None
        values[key] = float(value)
    return values if values["tokens"] > 0 else None
