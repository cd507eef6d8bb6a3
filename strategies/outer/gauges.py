"""What a round's updates say about the health of local training, from a fixed sample of coordinates.

    drift         |delta_i| / |theta|                       how far a site went
    cosine        mean over pairs of <delta_i, delta_j>     1: all agree, 0: unrelated, below: they fight
    to_merge      mean of <delta_i, merged delta>           unit vectors throughout
    outer_step    |theta' - theta| / |theta|                what the server made of it

At most SAMPLE coordinates, spread evenly over all floating tensors, are looked at while the updates pass by one at a
time: memory is SAMPLE numbers a site, whatever the model. On a model of no more numbers the gauges are exact. They
describe sites, so that a private run must not record them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from strategies.aggregation.dtypes import kind_of
from strategies.base import SiteUpdate

SAMPLE = 1 << 17

Arrays = Mapping[str, np.ndarray]


class Gauges:
    """The gauges of one round, which began at `state`."""

    def __init__(self, state: Arrays) -> None:
        self._names = [n for n in sorted(state) if kind_of(state[n].dtype) == "floating" and state[n].size]
        total = sum(state[n].size for n in self._names)
        self._stride = max(1, -(-total // SAMPLE))
        self._start = self._taken(state)
        self._deltas: dict[str, np.ndarray] = {}

    def watch(self, updates: Iterable[SiteUpdate]) -> Iterator[SiteUpdate]:
        """Pass the updates on, one at a time, and look at each."""
        for update in updates:
            if all(name in update.arrays for name in self._names):
                self._deltas[update.site] = self._taken(update.arrays) - self._start
            yield update

    def report(self, state: Arrays) -> dict[str, Any]:
        """Return the gauges once the next state is known; empty when no update was complete."""
        if not self._deltas:
            return {}
        size = norm(self._start) or 1.0
        rows = {site: norm(delta) for site, delta in self._deltas.items()}
        moving = [self._deltas[site] / length for site, length in rows.items() if length > 0]
        step = self._taken(state) - self._start
        found: dict[str, Any] = {
            "drift": {site: length / size for site, length in rows.items()},
            "outer_step": norm(step) / size,
        }
        if len(moving) > 1:
            total, count = np.sum(moving, axis=0), len(moving)
            # The sum of all pairs from the length of the sum.
            found["cosine"] = (float(np.vdot(total, total)) - count) / (count * (count - 1))
            merged = np.mean(list(self._deltas.values()), axis=0)
            if norm(merged) > 0:
                found["to_merge"] = float(np.mean([np.vdot(d, merged) for d in moving])) / norm(merged)
        return found

    def _taken(self, arrays: Arrays) -> np.ndarray:
        parts = [np.asarray(arrays[n]).reshape(-1)[:: self._stride].astype(np.float64) for n in self._names]
        return np.concatenate(parts) if parts else np.zeros(0)


def norm(vector: np.ndarray) -> float:
    """Return the L2 norm."""
    return float(np.sqrt(np.vdot(vector, vector)))
