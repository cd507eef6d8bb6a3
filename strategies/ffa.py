"""FFA-LoRA as a method: A is drawn from the run's seed at both ends, only B travels (Sun et al. 2024).

The formula is in `strategies.aggregation.rules.ffa`. The server names the hash of its A; a site whose A differs
refuses to train. arXiv 2403.12313.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strategies.aggregation.rules import ffa
from strategies.aggregation.rules.common import Contribution
from strategies.base import AdapterLayer, Order, Seat
from strategies.layerwise import LayerResult, LayerwiseStrategy
from umbel.digest import state_crc
from umbel.exchange import A, B, Exchange
from umbel.methods import exchange_of


class FFA(LayerwiseStrategy):
    """Frozen A, averaged B."""

    name = "ffa"
    capabilities = ffa.CAPABILITIES
    _crc = ""

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """As the base; names the A that every site must come to."""
        self._crc = state_crc({n: a for n, a in state.items() if n.endswith(A)})
        return super().orders(state, seats, commits, training=training)

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """B down, B up; the site draws A."""
        return exchange_of(self.config, commits, frozen_crc=self._crc)

    def layer(
        self, module: AdapterLayer, contributions: list[Contribution], state: Mapping[str, np.ndarray]
    ) -> LayerResult:
        """Return the mean of B beside the untouched A."""
        frozen = state[module.name + A]
        arrays = {**self.pair(module, ffa.aggregate(contributions, frozen)), module.name + A: frozen}
        return LayerResult({module.name + B: arrays[module.name + B]}, [self.term(module, arrays)])
