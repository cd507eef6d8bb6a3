"""Methods that train small cores between frozen factors: Ravan and Fed-SB. Exact, since B M A is linear in M.

    update s B M A,  M = blockdiag(M_1 .. M_h),   M <- sum_i p_i M_i       h q^2 numbers a layer travel up

    ravan   h = lora.heads, B and A random from the run's seed, never sent; a site sends gain x core  arXiv 2506.05568
    fedsb   h = 1; the first round sends low-rank gradients instead of training: B and A are the leading singular
            vectors of their mean, shipped once to each site                                          arXiv 2502.15436

A Ravan here trains all heads at every site, and its heads are normal, not orthogonalised: the same bits on every
machine. The mean gradient of fedsb's first round is seen by the server site by site; a secure sum of it is not done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from strategies.aggregation.products import Term, qr_svd
from strategies.aggregation.rules import fedsb, ravan
from strategies.aggregation.rules.common import Contribution, ideal_terms
from strategies.base import AdapterLayer, Order, Outcome, Seat, SiteUpdate, UmbelStrategy
from strategies.contributions import Contributions
from strategies.layerwise import Certificate, LayerResult, LayerwiseStrategy
from umbel.config import Config
from umbel.digest import state_crc
from umbel.errors import ConfigError
from umbel.exchange import CORE, A, B, Exchange
from umbel.methods import exchange_of
from umbel.models.lora import LoraSettings
from umbel.models.seeded import draw_heads


class CoreStrategy(UmbelStrategy):
    """Base of the two: the mean of the cores and its certificate."""

    num_heads = 1

    def blank(self, module: AdapterLayer) -> np.ndarray:
        """Return cores of zero [h, q, q]."""
        size = module.rank // self.num_heads
        return np.zeros((self.num_heads, size, size), self.dtype)

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Return the mean of the cores beside untouched factors."""
        fresh: dict[str, np.ndarray] = {}
        certificate = Certificate()
        with Contributions([m.name + CORE for m in self.modules]) as kept:
            for update in updates:
                kept.add(update.weight, update.arrays)
            for m in self.modules:
                rows = [(w, core.astype(np.float64)) for w, core in kept.of(m.name + CORE)]
                total = sum(w for w, _ in rows)
                if self.config.clients.normalise == "fixed" and expected_weight is not None:
                    whole = max(expected_weight, total)
                    rows.append((whole - total, state[m.name + CORE].astype(np.float64)))
                    total = whole
                mean = sum(w / total * core for w, core in rows)
                fresh[m.name + CORE] = np.asarray(mean).astype(self.dtype)
                served = [self.core_term(m, state, fresh[m.name + CORE], 1.0)]
                ideal = [self.core_term(m, state, core, w / total) for w, core in rows]
                certificate.add(m.name, served, ideal, None)
        return Outcome(self.stepped(state, fresh), {"exactness": certificate.report()})

    def core_term(
        self, module: AdapterLayer, state: Mapping[str, np.ndarray], core: np.ndarray, weight: float
    ) -> Term:
        """Return weight s B M A as a term."""
        b, size = state[module.name + B].astype(np.float64), core.shape[1]
        parts = [b[:, h * size : (h + 1) * size] @ core[h].astype(np.float64) for h in range(len(core))]
        return weight * self.scales[module.name], np.concatenate(parts, axis=1), state[module.name + A]


class Ravan(CoreStrategy):
    """Several heads between random factors that both ends draw."""

    name = "ravan"
    # Sites that train fewer heads are not supported.
    capabilities = dataclasses.replace(ravan.CAPABILITIES, heterogeneous_rank=False)
    _crc = ""

    def check(self, config: Config) -> None:
        """Refuse a number of heads that does not divide the rank."""
        super().check(config)
        self.num_heads = config.lora.heads
        if config.lora.rank % config.lora.heads or config.lora.rank_pattern:
            raise ConfigError(
                "lora.heads",
                f"must divide lora.rank = {config.lora.rank}, the same for all layers",
                got=config.lora.heads,
                allowed=f"divisors of {config.lora.rank}, without lora.rank-pattern",
            )

    def initial(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the drawn factors and cores of zero."""
        settings = LoraSettings(rank=self.config.lora.rank, dtype=self.dtype.name)
        drawn = draw_heads(self.modules, settings, self.config.run.seed)
        return {**drawn, **{m.name + CORE: self.blank(m) for m in self.modules}}

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """As the base; names the factors that every site must come to."""
        self._crc = state_crc({n: a for n, a in state.items() if n.endswith((A, B))})
        return super().orders(state, seats, commits, training=training)

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """Cores both ways."""
        return exchange_of(self.config, commits, frozen_crc=self._crc)


class FedSB(CoreStrategy, LayerwiseStrategy):
    """One core between the leading singular vectors of the first gradient, which is a rule on factors."""

    name = "fedsb"
    # Sites that train a smaller block are not supported.
    capabilities = dataclasses.replace(fedsb.CAPABILITIES, heterogeneous_rank=False)
    _crc = ""

    def check(self, config: Config) -> None:
        """As the base; refuses a quantised base, whose codes have no gradient to start from."""
        super().check(config)
        if config.model.quantization != "none":
            raise ConfigError(
                "model.quantization",
                "leaves no gradient of the base weights, from which method fedsb takes its factors",
                got=config.model.quantization,
                allowed="'none'",
                remedy="Use run.method = 'ravan' or 'carry' on a quantised base.",
            )

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """First a gradient; then factors and core down, to a returning site the core alone; core up."""
        return exchange_of(self.config, commits, frozen_crc=self._crc, returning=seat.returning)

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """As the base; names the factors that a returning site must have."""
        self._crc = state_crc({n: a for n, a in state.items() if n.endswith((A, B))})
        return super().orders(state, seats, commits, training=training)

    def measured(
        self, update: Mapping[str, np.ndarray], order: Order
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Mapping[str, float]]:
        """As the base; a gradient has no place among the norms of updates and counts as nothing."""
        return super().measured(update, order) if order.exchange.up.cores else ({}, {}, {})

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Return the mean core; in the first round the factors that the cores will stand between."""
        if not any(n.endswith(CORE) for n in state):
            # LayerwiseStrategy's frame gathers the gradients' factors; the cores' own does not fit yet.
            outcome = LayerwiseStrategy.aggregate(self, state, updates, expected_weight=None)
            outcome.metrics["exactness"]["note"] = "share of the mean gradient outside its leading directions"
            return outcome
        return super().aggregate(state, updates, expected_weight=expected_weight)

    def layer(
        self, module: AdapterLayer, contributions: list[Contribution], state: Mapping[str, np.ndarray]
    ) -> LayerResult:
        """Return orthonormal factors from the sites' low-rank gradients, and a core of zero."""
        ideal = ideal_terms(contributions)
        low = qr_svd(ideal, module.rank)
        a, b = (np.linalg.qr(x)[0] for x in (low.a.T, low.b))
        arrays = {
            module.name + A: np.ascontiguousarray(a.T).astype(self.dtype),
            module.name + B: np.ascontiguousarray(b).astype(self.dtype),
            module.name + CORE: self.blank(module),
        }
        return LayerResult(arrays, [(1.0, low.b, low.a)], ideal=ideal, tail=low.tail)
