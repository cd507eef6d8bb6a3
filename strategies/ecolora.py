"""EcoLoRA as a method: each site uploads one segment of the flattened adapter a round (arXiv 2506.02001).

    segment(position, round) = (position + round) mod lora.segments;  mean over its uploaders;  others keep their value

`position` is the place in the sorted cohort. It is an upload policy over factor averaging and has its bias; since no
whole adapter reaches the server, it cannot state the bias. Adaptive sparsity belongs to the codec (`compression.up`);
the site's mixing with its stale local part is not done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from strategies.aggregation.rules import ecolora
from strategies.base import Outcome, Seat, SiteUpdate, UmbelStrategy
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.exchange import SEGMENT, Exchange, flatten, unflatten
from umbel.methods import exchange_of


class EcoLoRA(UmbelStrategy):
    """Segments in turn."""

    name = "ecolora"
    capabilities = ecolora.CAPABILITIES

    def check(self, config: Config) -> None:
        """Refuse late updates and fixed weights: a segment of another round is another segment."""
        super().check(config)
        for key, got, wanted in (
            ("clients.late", config.clients.late, "drop"),
            ("clients.normalise", config.clients.normalise, "received"),
        ):
            if got != wanted:
                raise ConfigError(
                    key,
                    "does not fit method ecolora, where a round decides the segment",
                    got=got,
                    allowed=repr(wanted),
                )

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """The adapter down, one segment up."""
        return exchange_of(self.config, commits, position=seat.position)

    def known(
        self, state: Mapping[str, np.ndarray], down: Mapping[str, np.ndarray], exchange: Exchange
    ) -> Mapping[str, np.ndarray]:
        """Return what travels, and the segment's present values for the norm of the change."""
        return {**down, **exchange.up.pick(state, self.modules)}

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Return the adapter with every delivered segment replaced by its mean; `coverage` counts uploaders."""
        parts = [
            ecolora.SegmentUpdate(u.site, u.weight, self.given[u.site].exchange.up.part[0], u.arrays[SEGMENT])
            for u in updates
        ]
        done = ecolora.aggregate(flatten(state), parts, self.config.lora.segments)
        return Outcome(unflatten(done.vector, state), {"coverage": done.coverage.tolist()})
