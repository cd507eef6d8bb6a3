"""The clock of a task in a worker: also looks at whether anybody still waits for the answer, and takes notes."""

from __future__ import annotations

import time
from collections.abc import Callable

from client_app.clock import Clock
from umbel.errors import Refusal, RefusalKind


class WorkClock(Clock):
    """`expired` raises Refusal once `abandoned` says why the work is for nobody; between two steps, never in one."""

    def __init__(self, remaining_seconds: float, abandoned: Callable[[], str]) -> None:
        super().__init__(remaining_seconds)
        self._abandoned = abandoned
        self.steps, self.tokens = 0, 0
        self._first: tuple[float, int] | None = None

    @property
    def expired(self) -> bool:
        """True when the next step must not be started."""
        reason = self._abandoned()
        if reason:
            raise Refusal(RefusalKind.REFUSED, reason)
        return super().expired

    def note(self, steps: int, tokens: int) -> None:
        """Remember the steps and supervised tokens done so far."""
        if self._first is None:
            self._first = time.monotonic(), tokens
        self.steps, self.tokens = steps, tokens

    @property
    def tokens_per_second(self) -> float:
        """Supervised tokens a second since the end of the first step; 0.0 before the second one."""
        if self._first is None or self.tokens == self._first[1]:
            return 0.0
        return (self.tokens - self._first[1]) / max(1e-9, time.monotonic() - self._first[0])
