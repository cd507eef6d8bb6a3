"""Delayed Nesterov for asynchronous arrivals, and DyLU (Liu et al. 2024, arXiv 2401.09135).

On the arrival of one site's delta (g = -delta), with N the delay:

    theta <- theta - lr g / N         A <- A + g
    on each N-th arrival              m <- mu m + A / N;  theta <- theta - lr mu m;  A <- 0

Momentum moves once in N arrivals: plain Nesterov on every stale arrival diverges. N is about twice the mean
staleness, not the number of sites. DyLU gives a slow site fewer steps, H_i = max(1, floor(H v_i / v_max)), so that
arrivals come from bases of about the same age.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strategies.aggregation.dtypes import kind_of
from umbel.errors import ConfigError

SLOTS = ("gathered", "momentum")


class DelayedNesterov:
    """Keeps A and m (float32, by tensor) and the number of arrivals since m moved."""

    def __init__(self, lr: float, momentum: float, delay: int) -> None:
        for key, got, good, allowed in (
            ("learning-rate", lr, lr > 0, "> 0"),
            ("momentum", momentum, 0 <= momentum < 1, "[0, 1)"),
            ("delay", delay, delay >= 1, ">= 1"),
        ):
            if not good:
                raise ConfigError(f"server.{key}", "is out of range", got=got, allowed=allowed)
        self.lr, self.momentum, self.delay = float(lr), float(momentum), int(delay)
        self.arrivals = 0
        self._state: dict[str, np.ndarray] = {}

    def arrive(
        self, params: Mapping[str, np.ndarray], delta: Mapping[str, np.ndarray], factor: float = 1.0
    ) -> dict[str, np.ndarray]:
        """Return the parameters after one arrival; `factor` scales the delta (staleness).

        What is not floating is taken as the site sent it where it grew (counters never go back).
        """
        self.arrivals += 1
        turn = self.arrivals >= self.delay
        moved = {}
        for name, value in params.items():
            if kind_of(value.dtype) != "floating":
                moved[name] = np.maximum(value, delta[name]) if value.dtype.kind in "iu" else value.copy()
                continue
            g = -factor * delta[name].astype(np.float64).reshape(-1)
            new = value.astype(np.float64).reshape(-1) - self.lr * g / self.delay
            gathered = self._slot("gathered", name, value.size).astype(np.float64) + g
            if turn:
                m = self.momentum * self._slot("momentum", name, value.size).astype(np.float64)
                m += gathered / self.delay
                new -= self.lr * self.momentum * m
                self._state[f"momentum/{name}"] = m.astype(np.float32)
                gathered[:] = 0.0
            self._state[f"gathered/{name}"] = gathered.astype(np.float32)
            moved[name] = new.astype(value.dtype).reshape(value.shape)
        if turn:
            self.arrivals = 0
        return moved

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of A and m by tensor, and the count."""
        return {**{k: v.copy() for k, v in self._state.items()}, "arrivals": np.array(self.arrivals)}

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over what `state_dict` returned; raises ConfigError for state of another rule."""
        for key in arrays:
            if key != "arrivals" and key.split("/", 1)[0] not in SLOTS:
                raise ConfigError(
                    "server optimiser state", "belongs to another rule", got=key, allowed=", ".join(SLOTS)
                )
        self.arrivals = int(arrays["arrivals"]) if "arrivals" in arrays else 0
        self._state = {k: np.array(v) for k, v in arrays.items() if k != "arrivals"}

    def _slot(self, slot: str, name: str, size: int) -> np.ndarray:
        return self._state.setdefault(f"{slot}/{name}", np.zeros(size, np.float32))


def dylu_steps(period: int, speeds: Mapping[str, float]) -> dict[str, int]:
    """Return H_i by site from measured speeds (steps a second); a site without one (0) gets the full period."""
    best = max(speeds.values(), default=0.0)
    return {
        site: period if best <= 0 or speed <= 0 else max(1, int(period * speed / best + 1e-9))
        for site, speed in speeds.items()
    }
