"""Scripted faults of a site (`umbel.faults`): where in a training round they strike. Inert without a plan."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from umbel.faults import SITE_POINTS, FaultPlan

# What leaves the service is still on its way for a moment: `mid_upload` strikes then, `after_send` well after it.
DELAY_SECONDS = {"mid_upload": 0.02, "after_send": 2.0}


class Drill:
    """The faults planned for one site in one round."""

    def __init__(self, plan: FaultPlan, site: str, round_index: int) -> None:
        self._plan, self._site, self._round = plan, site, round_index
        self.active = any(f.who == site and f.round == round_index for f in plan.faults)

    def at(self, point: str) -> bool:
        """Do what is planned at `point`; returns True when the caller is to spoil its numbers."""
        assert point in SITE_POINTS
        return self.active and self._plan.fire(self._site, self._round, point) == "nan"

    def between_steps(self, clock: Any) -> None:
        """Let `mid_train` strike after the first step."""
        if not self.active:
            return
        note = clock.note

        def struck(steps: int, tokens: int) -> None:
            note(steps, tokens)
            self.at("mid_train")

        clock.note = struck

    def spoil(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays, with one NaN when that is planned after training."""
        if not self.at("after_train"):
            return arrays
        name = next(iter(arrays))
        spoilt = arrays[name].copy()
        spoilt.reshape(-1)[0] = np.nan
        return {**arrays, name: spoilt}

    def on_the_way(self) -> None:
        """Arm the faults that strike when the answer has left the service."""
        if not self.active:
            return
        for point, seconds in DELAY_SECONDS.items():
            if self._plan.planned(self._site, self._round, point) is not None:
                timer = threading.Timer(seconds, self.at, (point,))
                timer.daemon = True
                timer.start()
