"""RoLoRA as a method: rounds train B and A in turn, B first (Chen et al. 2025, arXiv 2502.01755).

The phase follows committed rounds and is stated in the instruction. Only the trained factor travels up. Down travels
the factor averaged last to a site that was in the last commit, both to any other; hashes tell what a site has. The
formula is in `strategies.aggregation.rules.rolora`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strategies.aggregation.rules import rolora
from strategies.aggregation.rules.common import Contribution, Factors
from strategies.base import AdapterLayer, Order, Seat
from strategies.layerwise import LayerResult, LayerwiseStrategy
from umbel.digest import state_crc
from umbel.exchange import SUFFIXES, A, B, Exchange
from umbel.methods import exchange_of


class RoLoRA(LayerwiseStrategy):
    """Alternating factors."""

    name = "rolora"
    capabilities = rolora.CAPABILITIES
    _phase: rolora.Phase = "B"
    _crc = ""

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """Both factors down, to a returning site the one it does not have; up the one of this phase."""
        return exchange_of(self.config, commits, frozen_crc=self._crc, returning=seat.returning)

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """As the base; remembers the phase of the round that is open."""
        if training:
            self._phase = rolora.phase(commits)
            self._crc = state_crc({n: a for n, a in state.items() if n.endswith(SUFFIXES[self._phase])})
        return super().orders(state, seats, commits, training=training)

    def layer(
        self, module: AdapterLayer, contributions: list[Contribution], state: Mapping[str, np.ndarray]
    ) -> LayerResult:
        """Return the mean of the trained factor; the other one keeps its bits."""
        previous = Factors(state[module.name + A], state[module.name + B])
        both = self.pair(module, rolora.aggregate(contributions, self._phase, previous))
        trained = module.name + SUFFIXES[self._phase]
        whole = {module.name + A: previous.a, module.name + B: previous.b, trained: both[trained]}
        return LayerResult({trained: both[trained]}, [self.term(module, whole)])
