"""FedSA-LoRA as a method: A is averaged, every site's B stays on its own disk (Guo et al. 2024, arXiv 2410.01463).

There is no global model: a site is evaluated and exported with its own B, at the site. The server cannot state an
exactness either, since it never sees a product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from strategies.aggregation.mean import WeightedMean
from strategies.aggregation.rules import fedsa
from strategies.base import Outcome, Seat, SiteUpdate, UmbelStrategy
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.exchange import A, Exchange
from umbel.methods import exchange_of


class FedSA(UmbelStrategy):
    """Shared A, own B."""

    name = "fedsa"
    capabilities = fedsa.CAPABILITIES

    def check(self, config: Config) -> None:
        """Refuse what needs a global model."""
        super().check(config)
        for key, got in (
            ("eval.central-data", config.eval.central_data),
            ("eval.sample-prompt", config.eval.sample_prompt),
        ):
            if got:
                raise ConfigError(
                    key,
                    "needs a global model and method fedsa has one a site",
                    got=got,
                    allowed="empty",
                    remedy="Held-out rows are scored at the sites; their state folders hold their adapters.",
                )

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """A both ways; B is the site's."""
        return exchange_of(self.config, commits)

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Return the mean of A."""
        shared = {n: a for n, a in state.items() if n.endswith(A)}
        normalise = "fixed" if self.config.clients.normalise == "fixed" else "received"
        mean = WeightedMean(shared, normalise=normalise, expected_weight=expected_weight)  # type: ignore[arg-type]
        for update in updates:
            mean.add(update.arrays, update.weight)
        return Outcome(self.stepped(state, mean.result()))
