"""Root-weighted mean: a large site counts more than a small one, but less than in proportion.

    x  <-  sum_i w_i^p x_i / sum_i w_i^p        w_i = tokens trained, p = 1/2

p = 1 is FedAvg, p = 0 counts every site the same. It does not correct that the mean of LoRA factors is not the mean of
their products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from strategies.aggregation.mean import WeightedMean
from strategies.base import Outcome, SiteUpdate, UmbelStrategy

POWER = 0.5


class RootMean(UmbelStrategy):
    """Mean of the sites' values, weighted by the square root of their tokens."""

    name = "root-mean"

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Return the mean; `largest_share` is recorded with the round and shown in the report."""
        mean = WeightedMean(state)
        weights = []
        for update in updates:
            weights.append(update.weight**POWER)
            mean.add(update.arrays, weights[-1])
        return Outcome(self.stepped(state, mean.result()), {"largest_share": max(weights) / sum(weights)})
