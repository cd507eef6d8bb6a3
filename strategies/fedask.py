"""FedASK as a method: the exact mean of products from sums alone, in two rounds of the engine (arXiv 2507.09990).

    odd     sites train, keep their factors, send Y_i = s B_i (A_i O);     Q = qr(mean Y) joins the state
    even    no training: sites send P_i = s A_i^T (B_i^T Q);               factors from the SVD of Q P^T

Exact up to the cut to lora.rank when lora.sketch reaches the sum of the cohort's ranks (its default); the cut is
stated. A site that was not in the odd round cannot answer the even one and says so; the mean is then that of the
others. `run.rounds` counts engine rounds: two for one of the method. The server reads sums only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from strategies.aggregation.products import Term, qr_svd
from strategies.aggregation.rules import fedask, sums
from strategies.base import AdapterLayer, Order, Outcome, Seat, SiteUpdate, UmbelStrategy
from strategies.layerwise import Certificate
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.exchange import SKETCH_IN, SKETCH_OUT, A, B, Exchange
from umbel.methods import exchange_of


class FedASK(UmbelStrategy):
    """Two-stage sketch."""

    name = "fedask"
    _columns = 0
    # One rank for all sites here; the sketch itself would allow more.
    capabilities = dataclasses.replace(fedask.CAPABILITIES, heterogeneous_rank=False)

    def check(self, config: Config) -> None:
        """Refuse an odd number of rounds and fixed weights, which the second stage could not keep."""
        super().check(config)
        if config.run.rounds % 2:
            raise ConfigError(
                "run.rounds",
                "must be even for method fedask: one of its rounds takes two",
                got=config.run.rounds,
                allowed="an even number",
            )
        if config.clients.normalise == "fixed" or config.train.optimizer_state == "keep":
            raise ConfigError(
                "run.method",
                "fedask needs clients.normalise = 'received' and train.optimizer-state = 'reset'",
                got=(config.clients.normalise, config.train.optimizer_state),
                allowed="'received' and 'reset'",
            )
        if config.compression.feedback > 0:
            raise ConfigError(
                "compression.feedback",
                "must be 0 for method fedask: its sketches take fresh random directions each round, so a residual of one "
                "is no part of the next",
                got=config.compression.feedback,
                allowed="0",
            )

    def directives(self, commits: int) -> dict[str, object]:
        """As the base, with the schedule over the rounds that train."""
        steps = self.config.train.local_steps
        return {
            "first_step": commits // 2 * steps,
            "total_steps": self.config.run.rounds // 2 * steps,
            "local_steps": steps,
        }

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """As the base; an evaluation gets the factors."""
        self._training = training
        # What a second stage projects on, after a restart too; a first stage takes as many columns as it needs.
        self._columns = max((a.shape[1] for n, a in state.items() if n.endswith(SKETCH_OUT)), default=0)
        if not training:
            state = {n: a for n, a in state.items() if n.endswith((A, B))}
        return super().orders(state, seats, commits, training=training)

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """Factors down and Y up, then Q down and P up."""
        if not self._training:
            return Exchange()
        wanted = self.config.lora.sketch or seat.cohort * self.config.lora.rank
        return exchange_of(self.config, commits, sketch=self._columns or wanted)

    def measured(
        self, update: Mapping[str, np.ndarray], order: Order
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Mapping[str, float]]:
        """Return sketches against nothing, Y divided by sqrt(k): then both stages measure about |s B A|."""
        new = {n: a / np.sqrt(a.shape[1]) if n.endswith(SKETCH_OUT) else a for n, a in update.items()}
        return new, {n: np.zeros_like(a) for n, a in new.items()}, {}

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Return the state with Q, or with the next factors and without Q."""
        total = sums.add(sums.summand(u.weight, u.arrays) for u in updates)
        second = any(n.endswith(SKETCH_OUT) for n in state)
        plain = {n: a for n, a in state.items() if not n.endswith(SKETCH_OUT)}
        if not second:
            for m in self.modules:
                basis = np.linalg.qr(sums.mean(total, m.name + SKETCH_OUT))[0]
                plain[m.name + SKETCH_OUT] = np.ascontiguousarray(basis, np.float32)
            return Outcome(plain, {"stage": 1})
        certificate = Certificate()
        for m in self.modules:
            exact: list[Term] = [(1.0, state[m.name + SKETCH_OUT], sums.mean(total, m.name + SKETCH_IN).T)]
            served, tail = self._factors(m, exact)
            plain.update(served)
            certificate.add(
                m.name, [(self.scales[m.name], served[m.name + B], served[m.name + A])], exact, tail
            )
        return Outcome(plain, {"exactness": certificate.report(), "stage": 2})

    def _factors(self, module: AdapterLayer, exact: list[Term]) -> tuple[dict[str, np.ndarray], float]:
        low, root = qr_svd(exact, module.rank), np.sqrt(self.scales[module.name])
        return {
            module.name + A: np.ascontiguousarray(low.a / root).astype(self.dtype),
            module.name + B: np.ascontiguousarray(low.b / root).astype(self.dtype),
        }, low.tail
