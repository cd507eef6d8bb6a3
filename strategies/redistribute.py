"""Methods for sites of different rank that serve factors cut to each site: FlexLoRA, raFLoRA and HetLoRA.

    flexlora   qr_svd of sum p_i s_i B_i A_i, turned as near to the last B as a rotation allows   arXiv 2402.11505
    raflora    qr_svd of the rank-partitioned mean                                               arXiv 2602.13486
    hetlora    mean of zero-padded factors, one denominator a rank row, then ordered by size     arXiv 2401.06432

The server keeps rank lora.rank; a site of rank r gets the first r directions at its own scale, the scale's root on
both sides. Aligning (flexlora) rotates directions, so it is done only where all ranks are equal: with mixed ranks
the order of the directions is what a smaller site is cut by.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strategies.aggregation.products import Term
from strategies.aggregation.rules import flexlora, hetlora, raflora
from strategies.aggregation.rules.common import Contribution, Factors, ideal_terms
from strategies.base import AdapterLayer, Seat
from strategies.carry import check_site_ranks
from strategies.layerwise import LayerResult, LayerwiseStrategy
from umbel.config import Config
from umbel.exchange import A, B, Exchange
from umbel.methods import exchange_of, rank_of_site


class CutToSites(LayerwiseStrategy):
    """Base of the three: what a smaller site gets."""

    def check(self, config: Config) -> None:
        """Refuse patterns beside per-site ranks."""
        super().check(config)
        check_site_ranks(config)

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """Both factors at the site's rank, both ways."""
        rank = rank_of_site(self.config, seat.name, seat.rank)
        return exchange_of(self.config, commits, rank=0 if rank == self.config.lora.rank else rank)

    def serve(self, state: Mapping[str, np.ndarray], seat: Seat, exchange: Exchange) -> dict[str, np.ndarray]:
        """Return the first directions at the site's own scale."""
        rank = exchange.down.rank
        if not rank:
            return super().serve(state, seat, exchange)
        found: dict[str, np.ndarray] = {}
        for m in self.modules:
            root = np.sqrt(self.scales[m.name] / self.scale(m, rank))
            a, b = (state[m.name + x].astype(np.float64) for x in (A, B))
            found.update(self.pair(m, Factors(a[:rank] * root, b[:, :rank] * root)))
        return found

    def mixed(self, module: AdapterLayer, contributions: list[Contribution]) -> bool:
        """Tell whether the order of directions matters: some site's rank is not the server's."""
        return bool(self.config.lora.site_ranks) or {len(c.a) for c in contributions} != {module.rank}

    def result(self, module: AdapterLayer, factors: Factors, tail: float | None) -> LayerResult:
        """Return a layer's result from factors at the server's scale."""
        arrays = self.pair(module, factors)
        return LayerResult(arrays, [self.term(module, arrays)], tail=tail)


class FlexLoRA(CutToSites):
    """Best approximation of the exact mean at the server's rank."""

    name = "flexlora"
    capabilities = flexlora.CAPABILITIES

    def terms(self, contributions: list[Contribution]) -> list[Term]:
        """Return the sum that is cut."""
        return ideal_terms(contributions)

    def layer(
        self, module: AdapterLayer, contributions: list[Contribution], state: Mapping[str, np.ndarray]
    ) -> LayerResult:
        """Return the truncated SVD, aligned to the last B where no site is cut."""
        target = flexlora.Target(module.rank, self.scales[module.name])
        old = None if self.mixed(module, contributions) else state[module.name + B]
        done = flexlora.redistribute(self.terms(contributions), [target], old)[target]
        return self.result(module, done.factors, done.tail)


class RaFLoRA(FlexLoRA):
    """A direction is averaged over the sites that have it; its target is not the exact mean."""

    name = "raflora"
    capabilities = raflora.CAPABILITIES

    def terms(self, contributions: list[Contribution]) -> list[Term]:
        """Return the rank-partitioned mean of updates in their own singular bases."""
        return raflora.partitioned_terms([raflora.order_directions(c) for c in contributions])


class HetLoRA(CutToSites):
    """Zero-padded mean of factors."""

    name = "hetlora"
    capabilities = hetlora.CAPABILITIES

    def layer(
        self, module: AdapterLayer, contributions: list[Contribution], state: Mapping[str, np.ndarray]
    ) -> LayerResult:
        """Return the padded mean, its directions ordered where a site is cut by them."""
        done = hetlora.aggregate(contributions, module.rank).factors
        if self.mixed(module, contributions):
            done = hetlora.order_directions(done)
        root = np.sqrt(self.scales[module.name])
        if self.mixed(module, contributions):
            return self.result(module, Factors(done.a / root, done.b / root), None)
        # Plain means keep A as it is: the scale comes off B alone, as it went on.
        return self.result(module, Factors(done.a, done.b / root**2), None)
