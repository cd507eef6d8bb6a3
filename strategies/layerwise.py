"""A method that works layer by layer on the factors of all sites: the frame around every LoRA rule.

For each adapted layer the sites' factors are gathered (a factor that did not travel is taken from what the server
knows of that site's start), handed to `layer`, and what comes back is compared with the exact mean

    error = | served - (common + sum_i p_i s_i B_i A_i) |_F / | common + sum_i p_i s_i B_i A_i |_F

`common` being what every site carries unchanged. The comparison is made in factor form after rounding to the
dtypes that are stored, so it is the error of what is really served. No rule is decided here.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strategies.aggregation.certificate import relative_error
from strategies.aggregation.products import Term
from strategies.aggregation.rules.common import Contribution, Factors, ideal_terms, with_server
from strategies.base import AdapterLayer, Outcome, SiteUpdate, UmbelStrategy
from strategies.contributions import Contributions
from umbel.exchange import A, B


@dataclass
class LayerResult:
    """The new tensors of one layer. `served` and `common` are terms of products; `tail` is the share
    of the ideal's norm that truncation cuts off, None for a rule that does not truncate."""

    arrays: dict[str, np.ndarray]
    served: list[Term]
    common: list[Term] = field(default_factory=list)
    ideal: list[Term] | None = None
    tail: float | None = None


class Certificate:
    """Adds up errors over the layers; `report` is what the round's record holds."""

    def __init__(self) -> None:
        self._error = self._ideal = self._tail = 0.0
        self._worst, self._worst_error, self._has_tail = "", -1.0, False

    def add(self, module: str, served: list[Term], ideal: list[Term], tail: float | None) -> None:
        """Take in one layer; `tail` is relative to the ideal."""
        error, size = relative_error(served, ideal)
        ratio = error / size if size > 0 else (0.0 if error == 0 else math.inf)
        if ratio > self._worst_error:
            self._worst, self._worst_error = module, ratio
        self._error, self._ideal = self._error + error**2, self._ideal + size**2
        if tail is not None:
            self._tail, self._has_tail = self._tail + (tail * size) ** 2, True

    def report(self) -> dict[str, Any]:
        """Return `relative_error`, `worst_layer`, `worst_layer_error` and, where a rule truncates, `tail`."""
        size = math.sqrt(self._ideal)
        error = math.sqrt(self._error)
        found: dict[str, Any] = {
            "relative_error": error / size if size > 0 else (0.0 if error == 0 else math.inf),
            "worst_layer": self._worst,
            "worst_layer_error": max(0.0, self._worst_error),
        }
        if self._has_tail:
            found["tail"] = math.sqrt(self._tail) / size if size > 0 else 0.0
        return found


class LayerwiseStrategy(UmbelStrategy):
    """Base of the rules on factors; a rule is its `layer` and its `exchange`."""

    def prepare(self, state: Mapping[str, np.ndarray], sites: list[str]) -> None:
        """Look at the cohort before the first layer; for rules whose shapes depend on it."""

    @abstractmethod
    def layer(
        self, module: AdapterLayer, contributions: list[Contribution], state: Mapping[str, np.ndarray]
    ) -> LayerResult:
        """Return what is served for one layer. `contributions` are in site order, at each site's own scale."""

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Apply `layer` to every layer; the metrics hold `exactness`."""
        fresh: dict[str, np.ndarray] = {}
        certificate = Certificate()
        sites: list[str] = []
        with Contributions([n for m in self.modules for n in (m.name + A, m.name + B)]) as kept:
            for update in updates:
                kept.add(update.weight, self.completed(update, state))
                sites.append(update.site)
            self.prepare(state, sites)
            for module in self.modules:
                contributions = self._contributions(module, sites, kept, state, expected_weight)
                result = self.layer(module, contributions, state)
                fresh.update(result.arrays)
                ideal = ideal_terms(contributions) if result.ideal is None else result.ideal
                certificate.add(module.name, result.served, [*result.common, *ideal], result.tail)
        return Outcome(self.stepped(state, fresh), {"exactness": certificate.report()})

    def completed(self, update: SiteUpdate, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return an update with the factors that did not travel put in."""
        given = self.given.get(update.site)
        return {**(state if given is None else given.known), **update.arrays}

    def _contributions(
        self,
        module: AdapterLayer,
        sites: list[str],
        kept: Contributions,
        state: Mapping[str, np.ndarray],
        expected_weight: float | None,
    ) -> list[Contribution]:
        a_of, b_of = kept.of(module.name + A), kept.of(module.name + B)
        # A late update stands beside its site's present one: a suffix keeps the two apart.
        names = [site if site not in sites[:i] else f"{site}\x00{i:06d}" for i, site in enumerate(sites)]
        rows = [
            Contribution(name, w, self.scale(module, len(a)), a, b)
            for name, (w, a), (_, b) in zip(names, a_of, b_of, strict=True)
        ]
        if self.config.clients.normalise == "fixed" and expected_weight is not None:
            own = Factors(state[module.name + A], state[module.name + B])
            total = max(expected_weight, sum(r.weight for r in rows))
            rows = with_server(rows, self.scale(module, len(own.a)), own, total)
        return rows

    def scale(self, module: AdapterLayer, rank: int) -> float:
        """Return s of a layer at a rank: one function for what a site used and for what it will use."""
        if rank == module.rank:
            return self.scales[module.name]
        return self.scales_at(rank)[module.name]

    def pair(self, module: AdapterLayer, factors: Factors) -> dict[str, np.ndarray]:
        """Return factors as state arrays in the adapter's dtype."""
        return {
            module.name + A: np.ascontiguousarray(factors.a).astype(self.dtype),
            module.name + B: np.ascontiguousarray(factors.b).astype(self.dtype),
        }

    def term(self, module: AdapterLayer, arrays: Mapping[str, np.ndarray]) -> Term:
        """Return s B A of a layer's stored factors."""
        a = arrays[module.name + A]
        return self.scale(module, len(a)), arrays[module.name + B], a
