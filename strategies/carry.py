"""Methods that keep what two mean factors cannot express in a frozen side adapter C: carry, FedEx-LoRA and FLoRA.

    effective weight   W + s B A + C        W is never touched: safe with 4 bits, a pinned reference and a resume

    carry   A, B <- means,  C <- C + s sum p_i (B_i - B)(A_i - A), cut to lora.carry-rank (0: exact)
    carry, mixed ranks   T = sum p_i (s_i B_i A_i + C_i); site i trains directions 1 .. r_i of T, carries the rest
    fedex   carry that is never cut; the published rule folds the residual into the base instead (arXiv 2410.09432)
    flora   C <- C + sum p_i s_i B_i A_i,  A drawn anew, B = 0; published: merged into the base (arXiv 2409.05976)

The maths is in `strategies.aggregation.rules`. C is float32 on both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from strategies.aggregation.products import Term, qr_svd
from strategies.aggregation.rules import carry as rule
from strategies.aggregation.rules import fedex, flora
from strategies.aggregation.rules.common import Contribution, Factors, canonical, ideal_terms, shares
from strategies.base import AdapterLayer, Order, Seat
from strategies.layerwise import LayerResult, LayerwiseStrategy
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.exchange import CARRY_A, CARRY_B, A, B, Exchange
from umbel.methods import exchange_of, rank_of_site, site_ranks
from umbel.models.adapter import initial_adapter
from umbel.models.lora import LoraSettings
from umbel.seeds import derive_seed


class SideAdapterStrategy(LayerwiseStrategy):
    """Base of the three: C in the state, in every frame down and in the certificate."""

    def side(self, module: AdapterLayer, state: Mapping[str, np.ndarray]) -> Factors:
        """Return C of a layer; rank 0 before there is any."""
        if module.name + CARRY_A not in state:
            return rule.empty(module.out_features, module.in_features)
        return Factors(state[module.name + CARRY_A], state[module.name + CARRY_B])

    def side_arrays(self, module: AdapterLayer, side: Factors) -> dict[str, np.ndarray]:
        """Return C as state arrays; none while its rank is 0."""
        if len(side.a) == 0:
            return {}
        return {
            module.name + CARRY_A: np.ascontiguousarray(side.a, np.float32),
            module.name + CARRY_B: np.ascontiguousarray(side.b, np.float32),
        }

    def side_rank(self, state: Mapping[str, np.ndarray]) -> int:
        """Return the rank of C before it is cut at a layer's smaller side."""
        return max((len(a) for n, a in state.items() if n.endswith(CARRY_A)), default=0)

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """As the base; remembers how large C is."""
        self._side_rank = self.side_rank(state)
        return super().orders(state, seats, commits, training=training)

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """Factors and C down, factors up."""
        return exchange_of(self.config, commits, carry=self._side_rank)

    def room(self, module: AdapterLayer) -> int:
        """Return the rank beyond which C gains nothing."""
        return min(module.in_features, module.out_features)

    def served(self, module: AdapterLayer, arrays: Mapping[str, np.ndarray]) -> list[Term]:
        """Return s B A and C as terms, from what is stored."""
        side = self.side(module, arrays)
        return [self.term(module, arrays), *([(1.0, side.b, side.a)] if len(side.a) else [])]


class Carry(SideAdapterStrategy):
    """The default exact method."""

    name = "carry"
    capabilities = rule.CAPABILITIES

    def check(self, config: Config) -> None:
        """Refuse patterns beside per-site ranks: a pattern names one rank for all sites."""
        super().check(config)
        check_site_ranks(config)
        cap = config.lora.carry_rank
        if site_ranks(config) and cap and cap < config.lora.rank:
            raise ConfigError(
                "lora.carry-rank",
                f"is the rank of the whole update when sites differ and must reach lora.rank = {config.lora.rank}",
                got=cap,
                allowed=f"0 or >= {config.lora.rank}",
            )

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """As the base; a smaller site trains the first directions and carries the others."""
        rank = rank_of_site(self.config, seat.name, seat.rank)
        if rank == self.config.lora.rank:
            return exchange_of(self.config, commits, carry=self._side_rank)
        rest = self._side_rank + self.config.lora.rank - rank
        return exchange_of(self.config, commits, rank=rank, carry=rest)

    def serve(self, state: Mapping[str, np.ndarray], seat: Seat, exchange: Exchange) -> dict[str, np.ndarray]:
        """Return the state's tensors, for a smaller site with the directions it does not train moved into C."""
        rank = exchange.down.rank
        if not rank:
            return super().serve(state, seat, exchange)
        found: dict[str, np.ndarray] = {}
        for m in self.modules:
            a, b = (state[m.name + x].astype(np.float64) for x in (A, B))
            full, own = self.scale(m, len(a)), self.scale(m, rank)
            # sqrt on both sides keeps the learning rates of A and B balanced.
            root = np.sqrt(full / own)
            found.update(self.pair(m, Factors(a[:rank] * root, b[:, :rank] * root)))
            side = self.side(m, state)
            rest: list[Term] = [(full, b[:, rank:], a[rank:])]
            rest += [(1.0, side.b, side.a)] if len(side.a) else []
            size = min(exchange.down.carry, self.room(m))
            low = qr_svd(rest, size)
            found.update(self.side_arrays(m, Factors(low.a, low.b)))
        return found

    def layer(
        self, module: AdapterLayer, contributions: list[Contribution], state: Mapping[str, np.ndarray]
    ) -> LayerResult:
        """Return mean factors and the next C; with mixed ranks the directions of T in order of size."""
        cap = self.config.lora.carry_rank
        if {len(c.a) for c in contributions} != {module.rank}:
            return self._mixed(module, contributions, state, cap)
        old = self.side(module, state)
        done = rule.aggregate(contributions, old, min(cap, self.room(module)) if cap else None)
        arrays = {**self.pair(module, done.factors), **self.side_arrays(module, done.carry)}
        common: list[Term] = [(1.0, old.b, old.a)] if len(old.a) else []
        return LayerResult(arrays, self.served(module, arrays), common, None, done.relative_error)

    def _mixed(
        self,
        module: AdapterLayer,
        contributions: list[Contribution],
        state: Mapping[str, np.ndarray],
        cap: int,
    ) -> LayerResult:
        """One SVD of T; A and B get its first directions, C the others."""
        ideal = ideal_terms(contributions)
        total = sum(len(c.a) for c in contributions)
        kept = canonical(contributions)
        for p, c in zip(shares(kept).tolist(), kept, strict=True):
            given = self.given.get(c.site)
            side = self.side(module, state if given is None else given.known)
            total += self._side_rank if given is None else given.exchange.down.carry
            ideal += [(p, side.b, side.a)] if len(side.a) else []
        rest = max(0, (min(total, cap) if cap else total) - module.rank)
        low = qr_svd(ideal, module.rank + min(rest, self.room(module)))
        root = np.sqrt(self.scales[module.name])
        trained = Factors(low.a[: module.rank] / root, low.b[:, : module.rank] / root)
        side = Factors(low.a[module.rank :], low.b[:, module.rank :])
        arrays = {**self.pair(module, trained), **self.side_arrays(module, side)}
        return LayerResult(arrays, self.served(module, arrays), [], ideal, low.tail)


class FedEx(Carry):
    """FedEx-LoRA: the whole residual, every round; kept in C here and never cut."""

    name = "fedex"
    # The published rule moves the base and is refused where that hurts; with C beside it nothing moves.
    capabilities = dataclasses.replace(
        fedex.CAPABILITIES, moves_base=False, safe_4bit=True, joiner_needs="A, B, C", note="residual in C"
    )

    def check(self, config: Config) -> None:
        """Refuse a cut: that is another method."""
        super().check(config)
        if config.lora.carry_rank:
            raise ConfigError(
                "lora.carry-rank",
                "would cut the residual that fedex keeps whole",
                got=config.lora.carry_rank,
                allowed="0",
                remedy="Use run.method = 'carry' for a side adapter of bounded rank.",
            )


class FLoRA(SideAdapterStrategy):
    """Stacks the updates into C and starts every round with a new adapter."""

    name = "flora"
    capabilities = dataclasses.replace(
        flora.CAPABILITIES, moves_base=False, safe_4bit=True, joiner_needs="A, B, C", note="stacks in C"
    )
    _commits = 0

    def check(self, config: Config) -> None:
        """Refuse kept optimiser moments: the factors they belong to are drawn anew every round."""
        super().check(config)
        check_site_ranks(config)
        if config.train.optimizer_state == "keep":
            raise ConfigError(
                "train.optimizer-state",
                "cannot be kept by method flora: every round starts a new adapter",
                got="keep",
                allowed="'reset'",
                remedy="Use run.method = 'carry', which keeps the factors.",
            )

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """As the base; remembers the round, the key of the next A."""
        self._commits = commits
        return super().orders(state, seats, commits, training=training)

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """Factors at the site's rank and C down, factors up."""
        rank = rank_of_site(self.config, seat.name, seat.rank)
        return exchange_of(
            self.config, commits, rank=0 if rank == self.config.lora.rank else rank, carry=self._side_rank
        )

    def serve(self, state: Mapping[str, np.ndarray], seat: Seat, exchange: Exchange) -> dict[str, np.ndarray]:
        """Return A cut to the site's rank, B = 0 and C."""
        rank = exchange.down.rank
        if not rank:
            return super().serve(state, seat, exchange)
        found: dict[str, np.ndarray] = {}
        for m in self.modules:
            found.update(self.pair(m, Factors(state[m.name + A][:rank], state[m.name + B][:, :rank])))
            found.update(self.side_arrays(m, self.side(m, state)))
        return found

    def layer(
        self, module: AdapterLayer, contributions: list[Contribution], state: Mapping[str, np.ndarray]
    ) -> LayerResult:
        """Return the next C and a fresh adapter with B = 0."""
        old, stacked = self.side(module, state), flora.aggregate(contributions)
        terms: list[Term] = [(1.0, old.b, old.a)] if len(old.a) else []
        terms.append((1.0, stacked.b, stacked.a))
        size = min(len(old.a) + sum(len(c.a) for c in contributions), self.room(module))
        cap = self.config.lora.carry_rank
        low = qr_svd(terms, min(size, cap) if cap else size)
        settings = LoraSettings(rank=module.rank, dtype=self.dtype.name)
        seed = derive_seed(self.config.run.seed, "flora", self._commits + 1)
        arrays = {
            **initial_adapter([module], settings, seed),  # type: ignore[list-item]
            **self.side_arrays(module, Factors(low.a, low.b)),
        }
        return LayerResult(arrays, self.served(module, arrays), terms[:-1], None, low.tail)


def check_site_ranks(config: Config) -> None:
    """Raise ConfigError when per-site ranks meet a rank pattern, or exceed `lora.rank`."""
    ranks = site_ranks(config)
    if ranks and (config.lora.rank_pattern or config.lora.alpha_pattern):
        raise ConfigError(
            "lora.site-ranks",
            "cannot be combined with lora.rank-pattern or lora.alpha-pattern",
            got=config.lora.site_ranks,
            allowed="one rank a site for all layers",
        )
    high = {site: rank for site, rank in ranks.items() if rank > config.lora.rank}
    if high:
        raise ConfigError(
            "lora.site-ranks",
            f"exceeds lora.rank = {config.lora.rank}, the rank the server keeps",
            got=high,
            allowed=f"1 .. {config.lora.rank}",
            remedy="Raise lora.rank.",
        )
