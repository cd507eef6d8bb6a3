"""When a round ends: a pure function of what has arrived.

    collect until   every asked site has answered
                 or accepted == goal
                 or accepted >= quorum  and  now - t_quorum >= grace
                 or now - t_dispatch >= deadline
    then            COMMIT if accepted >= quorum else SKIP

A deadline may adapt to what sites really need: median + 6 x MAD of the last arrival times, clamped; the first
rounds use the full one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

# Six median absolute deviations: about four standard deviations of a normal distribution, so that an ordinary
# slow round is not cut; fewer than eight arrivals say too little.
MAD_FACTOR = 6.0
MIN_ARRIVALS = 8
ARRIVAL_WINDOW = 64


class Verdict(StrEnum):
    """What to do with the open round now."""

    WAIT = "wait"
    COMMIT = "commit"
    SKIP = "skip"


@dataclass(frozen=True)
class RoundPolicy:
    """Goal, quorum (accepted updates) and the two waits (seconds) of one round."""

    goal: int
    quorum: int
    deadline_seconds: float
    grace_seconds: float

    def decide(
        self,
        *,
        elapsed_seconds: float,
        asked: int,
        answered: int,
        accepted: int,
        since_quorum_seconds: float | None,
    ) -> Verdict:
        """Return the verdict; `answered` counts accepted, rejected and failed sites alike."""
        over = (
            answered >= asked
            or accepted >= self.goal
            or (since_quorum_seconds is not None and since_quorum_seconds >= self.grace_seconds)
            or elapsed_seconds >= self.deadline_seconds
        )
        if not over:
            return Verdict.WAIT
        return Verdict.COMMIT if accepted >= self.quorum and accepted > 0 else Verdict.SKIP


def num_asked(goal: int, over_provision: float, available: int) -> int:
    """Return how many sites are asked for `goal` updates: ceil(x * goal), never more than there are.

    x = 0 chooses: 1.0 up to 8 sites, 1.3 above 16, in between in proportion.
    """
    factor = over_provision
    if factor == 0.0:
        factor = 1.0 + 0.3 * min(1.0, max(0.0, (goal - 8) / 8))
    return min(available, max(goal, math.ceil(factor * goal - 1e-9)))


def adaptive_deadline(arrivals: Sequence[float], low: float, high: float) -> float:
    """Return the deadline in seconds from recent arrival times (seconds after dispatch)."""
    recent = list(arrivals)[-ARRIVAL_WINDOW:]
    if len(recent) < MIN_ARRIVALS:
        return high
    middle = statistics.median(recent)
    spread = statistics.median(abs(x - middle) for x in recent)
    return min(high, max(low, middle + MAD_FACTOR * spread))
