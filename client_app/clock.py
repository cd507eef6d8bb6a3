"""A deadline on the site's own monotonic clock.

The instruction states the seconds that remain, never a time of day: clocks of institutions differ by minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Counts down from `remaining_seconds`; work stops a margin earlier, so that the answer can still travel."""

    def __init__(self, remaining_seconds: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.margin_seconds = min(30.0, 0.1 * max(0.0, remaining_seconds))
        self._end = now() + remaining_seconds - self.margin_seconds

    @property
    def left_seconds(self) -> float:
        """Seconds of work that remain; negative once the deadline has passed."""
        return self._end - self._now()

    @property
    def expired(self) -> bool:
        """True when the next step must not be started."""
        return self.left_seconds <= 0.0

    def note(self, steps: int, tokens: int) -> None:
        """Take note of the steps and supervised tokens done so far; a resident worker shows them."""
