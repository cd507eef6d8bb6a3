"""Fed-PLoRA as a method: the adapter is R parallel rank-one modules, a site trains r_i of them (arXiv 2602.16936).

The server states the selection, which moves on by itself until all modules are covered; the modules a site does not
train travel as its frozen side adapter. Down all R, up the r_i selected. r_i is the site's rank, half of lora.rank
where none is named.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from strategies.aggregation.products import Term, qr_svd
from strategies.aggregation.rules import fedplora
from strategies.aggregation.rules.common import Contribution, Factors, canonical, shares
from strategies.base import AdapterLayer, Order, Seat
from strategies.carry import SideAdapterStrategy, check_site_ranks
from strategies.layerwise import LayerResult
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.exchange import A, B, Exchange
from umbel.methods import exchange_of, rank_of_site


class FedPLoRA(SideAdapterStrategy):
    """Parallel rank-one modules."""

    name = "fedplora"
    capabilities = fedplora.CAPABILITIES

    def check(self, config: Config) -> None:
        """Refuse what does not fit a moving selection."""
        super().check(config)
        check_site_ranks(config)
        wrong = (
            ("train.optimizer-state", config.train.optimizer_state, "reset"),
            ("clients.late", config.clients.late, "drop"),
            ("clients.normalise", config.clients.normalise, "received"),
        )
        for key, got, wanted in wrong:
            if got != wanted:
                raise ConfigError(
                    key,
                    "does not fit method fedplora: every site trains other modules in every round",
                    got=got,
                    allowed=repr(wanted),
                    remedy="Use run.method = 'flexlora' or 'carry' for sites of different rank.",
                )

    def trained(self, seat: Seat) -> int:
        """Return how many modules a site trains."""
        rank = rank_of_site(self.config, seat.name, seat.rank)
        named = rank != self.config.lora.rank or seat.name in self.config.lora.site_ranks
        return rank if named else max(1, rank // 2)

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """As the base; an evaluation gets the whole adapter."""
        self._training = training
        if training:
            self._selected = {s.name: self.selection(s, commits) for s in seats}
        return super().orders(state, seats, commits, training=training)

    def selection(self, seat: Seat, commits: int) -> list[int]:
        """Return the modules a site trains in the next round."""
        return fedplora.select(
            self.config.lora.rank, self.trained(seat), seat.position, commits + 1, seat.cohort
        )

    def audience(self, seat: Seat, commits: int) -> Hashable:
        """Sites with the same selection share a frame."""
        return tuple(self.selection(seat, commits)) if self._training else None

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """Selected modules as the adapter, the rest as the side adapter; selected modules back."""
        if not self._training:
            return Exchange()
        rank = self.trained(seat)
        return exchange_of(self.config, commits, rank=rank, carry=self.config.lora.rank - rank)

    def serve(self, state: Mapping[str, np.ndarray], seat: Seat, exchange: Exchange) -> dict[str, np.ndarray]:
        """Return the split adapter; the scale's root goes on both factors of what is trained."""
        found: dict[str, np.ndarray] = {}
        for m in self.modules:
            whole = Factors(state[m.name + A].astype(np.float64), state[m.name + B].astype(np.float64))
            rest, chosen = fedplora.split(whole, self._selected[seat.name])
            root = self._root(m, exchange.down.rank)
            found.update(self.pair(m, Factors(chosen.a * root, chosen.b * root)))
            size = min(exchange.down.carry, self.room(m))
            side = Factors(rest.a, rest.b * self.scales[m.name])
            if len(side.a) > size:
                low = qr_svd([(1.0, side.b, side.a)], size)
                side = Factors(low.a, low.b)
            found.update(self.side_arrays(m, side))
        return found

    def _root(self, module: AdapterLayer, rank: int) -> float:
        return float(np.sqrt(self.scales[module.name] / self.scale(module, rank)))

    def layer(
        self, module: AdapterLayer, contributions: list[Contribution], state: Mapping[str, np.ndarray]
    ) -> LayerResult:
        """Return the mean of each module over its trainers; the others keep their bits."""
        kept = canonical(contributions)
        updates, ideal = [], list[Term]()
        for p, c in zip(shares(kept).tolist(), kept, strict=True):
            root = self._root(module, len(c.a))
            chosen = self._selected[c.site]
            updates.append(fedplora.ModuleUpdate(c.site, c.weight, chosen, c.a / root, c.b / root))
            side = self.side(module, self.given[c.site].known)
            ideal += [(p * c.scale, c.b, c.a), *([(p, side.b, side.a)] if len(side.a) else [])]
        done = fedplora.aggregate(Factors(state[module.name + A], state[module.name + B]), updates)
        arrays = self.pair(module, done.factors)
        return LayerResult(arrays, [self.term(module, arrays)], ideal=ideal)
