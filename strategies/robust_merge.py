"""Robust merges in place of the mean: a minority of liars moves the result only so far.

    x  <-  g + sum_i c_i (x_i - g)                      coefficients c from the rule (krum, multi-krum,
                                                        geometric-median, centred-clipping, norm-clipping)
    x  <-  g + rule_j (x_1j - g_j, .., x_nj - g_j)      coordinate by coordinate (coordinate-median, trimmed-mean)
    x  <-  g + mean length along the mean direction     tensor by tensor (rda: `strategies.outer.rda`)

g is the state the sites started from. The rules and their papers: `strategies.aggregation.robust`. For an adapter
x is the effective update s B A of a layer and never a factor: factors of two sites have no common basis. What
comes out is factored again at the adapter's rank; what that cuts off is reported (`truncation`), as is the share
of weight that the rule threw away (`discarded_share`): on data that differ between sites, such rules drop honest
minorities. Coordinate rules need the dense update of one layer of every site at a time.

Unlike the mean, a robust rule needs all updates at once: memory grows with the number of sites. None of these
rules is proof against back doors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from strategies.aggregation.layers import pair_layers
from strategies.aggregation.products import LowRank, qr_svd
from strategies.aggregation.robust.clipping import centred_clipping_coefficients, norm_clip_factors
from strategies.aggregation.robust.common import combine, discarded, require_sites, shares
from strategies.aggregation.robust.coordinate import coordinate_median, trimmed_mean
from strategies.aggregation.robust.distance import adapter_squared_distances, squared_distances
from strategies.aggregation.robust.geometric_median import geometric_median_coefficients
from strategies.aggregation.robust.krum import krum_selection
from strategies.base import Outcome, SiteUpdate, UmbelStrategy
from strategies.outer import rda
from strategies.outer.solo import is_degraded
from umbel.config import Config
from umbel.config.check import fewest_updates

COORDINATE_RULES = ("coordinate-median", "trimmed-mean")

Arrays = Mapping[str, np.ndarray]


class RobustMerge:
    """Merges updates by `clients.merge`; one object a run, without memory between rounds."""

    def __init__(self, config: Config, strategy: UmbelStrategy) -> None:
        self.rule, self.byzantine = config.clients.merge, config.clients.byzantine
        self.factor, self.scales = config.clients.clip_factor, strategy.scales
        self._strategy, self._solo = strategy, config.server.solo

    def aggregate(
        self, state: Arrays, updates: Iterable[SiteUpdate], *, expected_weight: float | None = None
    ) -> Outcome:
        """Return the next state; raises ConfigError below the rule's bound on the number of updates."""
        known = list(updates)
        require_sites(
            f"clients.merge = {self.rule!r}",
            len(known),
            self.byzantine,
            fewest_updates(self.rule, self.byzantine),
        )
        pairs = pair_layers(state) if self.scales else {}
        plain = [n for n in state if n not in {name for pair in pairs.values() for name in pair}]
        if self.rule == "rda":
            given = effective = shares([u.weight for u in known], len(known))
            merged, tail = self._by_direction(state, known, given), 0.0
        elif self.rule in COORDINATE_RULES:
            merged, effective, tail = self._by_coordinate(state, known, pairs, plain)
            given = np.full(len(known), 1.0 / len(known))
        else:
            given = shares([u.weight for u in known], len(known))
            effective = self._coefficients(state, known, pairs, plain, given)
            merged, tail = self._combined(state, known, pairs, plain, effective)
        report: dict[str, Any] = {
            "rule": self.rule,
            "discarded_share": discarded(given, effective),
            "effective": {u.site: float(v) for u, v in zip(known, effective)},
            "truncation": tail,
        }
        whole = {name: merged[name] for name in state}
        # The outer step comes after the merge, whatever the merge was.
        alone = is_degraded(self._solo, len(self._strategy.given), len(known))
        return Outcome(whole if alone else self._strategy.stepped(state, whole), {"robust": report})

    def _by_direction(
        self, state: Arrays, known: list[SiteUpdate], weights: np.ndarray
    ) -> dict[str, np.ndarray]:
        """RDA, tensor by tensor; whole models only."""
        merged = {}
        for name, value in state.items():
            start = np.asarray(value).reshape(-1)
            rows = [np.asarray(u.arrays[name]).reshape(-1) for u in known]

            def rule(values: list[np.ndarray], name: str = name, start: np.ndarray = start) -> np.ndarray:
                wide = start.astype(np.float64)
                deltas = [row.astype(np.float64) - wide for row in values]
                return wide + rda.merge(deltas, weights, plain=rda.is_embedding(name))

            merged[name] = self._plain(value, rows, rule)
        return merged

    def _coefficients(
        self, state: Arrays, known: list[SiteUpdate], pairs: dict, plain: list[str], given: np.ndarray
    ) -> np.ndarray:
        """Return c [n] from the distances between g and all updates; sum <= 1, the rest is g's."""
        points = [state, *(u.arrays for u in known)]
        squared = self._squared(points, pairs, plain)
        sites, norms = squared[1:, 1:], np.sqrt(squared[0, 1:])
        if self.rule == "geometric-median":
            return geometric_median_coefficients(sites, list(given))
        if self.rule == "norm-clipping":
            return given * norm_clip_factors(norms, self.factor)
        if self.rule == "centred-clipping":
            radius = self.factor * float(np.median(norms))
            if radius == 0.0:
                return given
            return centred_clipping_coefficients(squared, radius, list(given))[1:]
        selected = krum_selection(sites, self.byzantine, 1 if self.rule == "krum" else None)
        chosen = np.zeros(len(known))
        chosen[selected] = given[selected]
        return chosen / chosen.sum()

    def _squared(self, points: Sequence[Arrays], pairs: dict, plain: list[str]) -> np.ndarray:
        """Return squared distances [n, n]: of products for adapted layers, of values elsewhere."""
        squared = np.zeros((len(points), len(points)))
        if pairs:
            adapters = [{m: (self.scales[m], p[b], p[a]) for m, (a, b) in pairs.items()} for p in points]
            squared += adapter_squared_distances(adapters)
        floating = [n for n in plain if points[0][n].dtype.kind not in "iub"]
        for name in floating:
            squared += squared_distances([np.asarray(p[name]).reshape(-1) for p in points])
        return squared

    def _combined(
        self, state: Arrays, known: list[SiteUpdate], pairs: dict, plain: list[str], weights: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float]:
        alone = np.flatnonzero(weights)
        if len(alone) == 1 and weights[alone[0]] == 1.0:
            return {n: np.array(a) for n, a in known[alone[0]].arrays.items()}, 0.0
        points = [state, *(u.arrays for u in known)]
        coefficients = np.array([1.0 - weights.sum(), *weights])
        if abs(coefficients[0]) < 1e-12:
            coefficients[0] = 0.0
        merged, tails = {}, [0.0]
        for name in plain:
            rows = [np.asarray(p[name]).reshape(-1) for p in points]
            merged[name] = self._plain(state[name], rows, lambda r: combine(r, coefficients))
        for module, (a, b) in pairs.items():
            scale = self.scales[module]
            terms = [(c * scale, p[b], p[a]) for c, p in zip(coefficients, points) if c != 0.0]
            tails.append(self._factored(merged, state, (a, b), scale, qr_svd(terms, state[a].shape[0])))
        return merged, max(tails)

    def _by_coordinate(
        self, state: Arrays, known: list[SiteUpdate], pairs: dict, plain: list[str]
    ) -> tuple[dict[str, np.ndarray], np.ndarray, float]:
        merged: dict[str, np.ndarray] = {}
        tails, counted, total = [0.0], np.zeros(len(known)), 0

        def rule(rows: list[np.ndarray]) -> np.ndarray:
            nonlocal counted, total
            found = (
                trimmed_mean(rows, self.byzantine)
                if self.rule == "trimmed-mean"
                else coordinate_median(rows, self.byzantine)
            )
            counted, total = counted + found.effective_weights * rows[0].size, total + rows[0].size
            return found.value

        for name in plain:
            rows = [np.asarray(u.arrays[name]).reshape(-1) for u in known]
            merged[name] = self._plain(state[name], rows, rule)
        for module, (a, b) in pairs.items():
            scale = self.scales[module]
            dense = [scale * (_f64(u.arrays[b]) @ _f64(u.arrays[a])) for u in known]
            shape = dense[0].shape
            value = rule([d.reshape(-1) for d in dense]).reshape(shape)
            # As a product of rank min(out, in): the value itself times the identity.
            term = (value, np.eye(shape[1])) if shape[1] <= shape[0] else (np.eye(shape[0]), value)
            rank = state[a].shape[0]
            tails.append(self._factored(merged, state, (a, b), scale, qr_svd([(1.0, *term)], rank)))
        return merged, counted / max(total, 1), max(tails)

    def _plain(self, like: np.ndarray, rows: list[np.ndarray], rule: Any) -> np.ndarray:
        if like.dtype.kind == "b":
            return like.copy()
        if like.dtype.kind in "iu":
            return np.max(rows[-len(rows) :], axis=0).reshape(like.shape).astype(like.dtype)
        return rule(rows).reshape(like.shape).astype(like.dtype)

    def _factored(
        self,
        merged: dict[str, np.ndarray],
        state: Arrays,
        names: tuple[str, str],
        scale: float,
        found: LowRank,
    ) -> float:
        a, b = names
        if not found.singular_values.any():
            # Two zero factors would never move again.
            merged[a], merged[b] = state[a].copy(), np.zeros_like(state[b])
            return 0.0
        merged[a] = found.a.astype(state[a].dtype)
        merged[b] = (found.b / scale).astype(state[b].dtype)
        return float(found.tail)


def _f64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64)
