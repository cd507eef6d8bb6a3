"""FedAvg, and FedIT when what is averaged is an adapter.

    x  <-  sum_i w_i x_i / sum_i w_i        w_i = tokens trained (or 1)

(McMahan et al. 2017, arXiv 1602.05629, Algorithm 1; for LoRA factors: Zhang et al. 2023, arXiv 2305.05644.) Sums
run in float64 in canonical site order: the result does not depend on who answered first.

Sites that took unequal numbers of steps t_i pull the mean towards those that took more. With
`server.step-weights = "fednova"` each counts by its mean step (Wang et al. 2020, arXiv 2007.07481, for plain local SGD)

    x  <-  x + t_eff sum_i p_i (x_i - x) / t_i        t_eff = sum_i p_i t_i

and equal steps give the mean above. Local AdamW is not plain SGD: there it is a weighting, not a derivation.

Averaging A and B apart is not averaging B A. The error of the served adapter against the exact weighted mean of
the products is therefore stated every round (`exactness`); it is not corrected here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from strategies.aggregation.certificate import factor_mean_error
from strategies.aggregation.layers import pair_layers
from strategies.aggregation.mean import WeightedMean
from strategies.aggregation.rules import fedit
from strategies.base import Outcome, SiteUpdate, UmbelStrategy
from strategies.contributions import Contributions
from strategies.outer.solo import is_degraded


class FedAvg(UmbelStrategy):
    """Weighted mean of the sites' values."""

    name = "fedavg"
    capabilities = fedit.CAPABILITIES

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Return the mean and, for adapters, how exact it is (with fednova: that mean before it is stretched)."""
        nova = self.config.server.step_weights == "fednova"
        weights = steps = 0.0
        pairs = pair_layers(state) if self.scales else {}
        normalise = "fixed" if self.config.clients.normalise == "fixed" else "received"
        mean = WeightedMean(state, normalise=normalise, expected_weight=expected_weight)  # type: ignore[arg-type]
        with Contributions([n for pair in pairs.values() for n in pair]) as kept:
            for update in updates:
                weight = update.weight / max(1, update.steps) if nova else update.weight
                mean.add(update.arrays, weight)
                kept.add(weight, update.arrays)
                weights, steps = weights + update.weight, steps + update.weight * max(1, update.steps)
            served = mean.result()
            metrics = {}
            if pairs:
                report = factor_mean_error(self._layers(served, pairs, kept))
                metrics["exactness"] = {
                    k: report[k] for k in ("relative_error", "worst_layer", "worst_layer_error")
                }
        if mean.num_contributors == 0:
            # Not even the momentum moves.
            return Outcome(dict(state), metrics)
        if nova:
            # sum_i p_i d_i / t_i is the mean under the weights w_i / t_i, times their share of the sum of all w_i.
            served = stretched(state, served, steps / weights * mean.total_weight / weights)
        if is_degraded(self.config.server.solo, len(self.given), mean.num_contributors):
            return Outcome({**state, **served}, metrics)
        return Outcome(self.stepped(state, served), metrics)

    def _layers(
        self, served: Mapping[str, np.ndarray], pairs: Mapping[str, tuple[str, str]], kept: Contributions
    ) -> Iterator[tuple]:
        for module, (a_name, b_name) in pairs.items():
            terms = [(w, a, b) for (w, a), (_, b) in zip(kept.of(a_name), kept.of(b_name), strict=True)]
            yield module, self.scales[module], terms, served[a_name], served[b_name]


def stretched(
    state: Mapping[str, np.ndarray], mean: Mapping[str, np.ndarray], factor: float
) -> dict[str, np.ndarray]:
    """Return state + factor (mean - state) in float64, rounded to the dtypes of `state`; what is not floating is the
    mean's. A factor of 1 changes no bit of the mean."""
    if factor == 1:
        return dict(mean)
    found = {}
    for name, value in mean.items():
        if np.issubdtype(value.dtype, np.integer) or value.dtype == bool:
            found[name] = value
            continue
        start = state[name].astype(np.float64)
        found[name] = (start + factor * (value.astype(np.float64) - start)).astype(value.dtype)
    return found
