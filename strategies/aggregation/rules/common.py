"""What the LoRA rules share: one site's factors of one layer, their order, their shares, the ideal.

Rule 0: B A is never aggregated without its scale. The ideal of a layer is

    D* = sum_i p_i s_i B_i A_i,     p_i = w_i / sum_j w_j over the sites that sent this layer

Every rule sorts its contributions by site name first, so that the bits do not depend on who answered first.
With `normalise = "fixed"` (needed for DP) add the server's own factors as one more contribution of the weight
that is missing (`with_server`): linear rules then give B_g + sum p_i (B_i - B_g), product rules the same on
products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from strategies.aggregation.dtypes import all_finite
from strategies.aggregation.errors import UpdateError
from strategies.aggregation.layers import pair_layers
from strategies.aggregation.mean import check_weight
from strategies.aggregation.products import Term
from umbel.errors import ConfigError

SERVER = ""  # sorts before every site name


class Factors(NamedTuple):
    """A [r, in] and B [out, r] of one layer; the update is scale * B A."""

    a: np.ndarray
    b: np.ndarray


class Contribution(NamedTuple):
    """One site's factors of one layer: A [r, in], B [out, r], scale s (alpha / r or alpha / sqrt r)."""

    site: str
    weight: float
    scale: float
    a: np.ndarray
    b: np.ndarray


def canonical(contributions: Iterable[Contribution]) -> list[Contribution]:
    """Return the contributions of positive weight in site order, factors lifted to float64.

    Raises UpdateError for a bad weight, a NaN, a site named twice, or when nobody is left.
    """
    kept = sorted((c for c in contributions if check_weight(c.weight) > 0), key=lambda c: c.site)
    for first, second in pairwise(kept):
        if first.site == second.site:
            raise UpdateError(
                f"site {first.site!r}", "contributes twice", allowed="one update a site and round"
            )
    if not kept:
        raise UpdateError("contributions", "are empty", remedy="Keep the layer as it is.")
    return [c._replace(a=_finite(c, "a"), b=_finite(c, "b")) for c in kept]


def screen(contributions: Iterable[Contribution]) -> tuple[list[Contribution], dict[str, str]]:
    """Split into (usable, site -> reason): unusable weights and non-finite factors never reach a sum."""
    usable, rejected = [], {}
    for contribution in contributions:
        try:
            check_weight(contribution.weight)
            _finite(contribution, "a"), _finite(contribution, "b")
            usable.append(contribution)
        except UpdateError as error:
            rejected[contribution.site] = str(error)
    return usable, rejected


def shares(contributions: Sequence[Contribution]) -> np.ndarray:
    """Return p_i [n], sum 1."""
    weights = np.array([c.weight for c in contributions], np.float64)
    return weights / weights.sum()


def ideal_terms(contributions: Iterable[Contribution]) -> list[Term]:
    """Return D* as terms (p_i s_i, B_i, A_i) in site order."""
    kept = canonical(contributions)
    return [(p * c.scale, c.b, c.a) for p, c in zip(shares(kept).tolist(), kept)]


def with_server(
    contributions: Iterable[Contribution], scale: float, previous: Factors, expected_weight: float
) -> list[Contribution]:
    """Return the contributions and the server's factors with weight W - sum w: fixed normalisation.

    Raises ConfigError if the sites together weigh more than W, the bound that privacy accounting relies on.
    """
    kept = list(contributions)
    missing = expected_weight - sum(c.weight for c in kept)
    if missing < 0:
        raise ConfigError(
            "expected_weight",
            "is below the weight received",
            got=expected_weight,
            allowed="the cohort's bound",
        )
    return [Contribution(SERVER, missing, scale, previous.a, previous.b), *kept]


def require_equal(rule: str, contributions: Sequence[Contribution]) -> float:
    """Return the common scale. Raises ConfigError naming the sites unless all ranks and scales are equal."""
    first = contributions[0]
    for other in contributions[1:]:
        if other.scale != first.scale or other.a.shape != first.a.shape or other.b.shape != first.b.shape:
            raise ConfigError(
                f"rule {rule}",
                "needs equal rank and scale at all sites",
                got={c.site: (len(c.a), c.scale) for c in (first, other)},
                allowed="one rank and one alpha",
                remedy="Use flexlora or carry, or give every site the same adapter.",
            )
    return first.scale


def by_layer(
    updates: Sequence[tuple[str, float, Mapping[str, np.ndarray]]],
    scales: Mapping[str, float] | Mapping[str, Mapping[str, float]],
) -> Iterator[tuple[str, list[Contribution]]]:
    """Yield (module, contributions) in module order from (site, weight, arrays) with canonical names.

    `scales` maps module -> s, or site -> {module -> s} where sites differ. A site that lacks a layer is left
    out of it.
    """
    pairs = {site: pair_layers(arrays) for site, _, arrays in updates}
    for module in sorted({m for found in pairs.values() for m in found}):
        rows = []
        for site, weight, arrays in updates:
            if module in pairs[site]:
                a_name, b_name = pairs[site][module]
                own = scales.get(site, scales)
                scale = own[module] if isinstance(own, Mapping) else scales[module]
                assert isinstance(scale, (int, float))
                rows.append(Contribution(site, weight, float(scale), arrays[a_name], arrays[b_name]))
        yield module, rows


def orient(delta: np.ndarray, fan_in_fan_out: bool) -> np.ndarray:
    """Return the update [out, in] as the layer stores its weight: transposed for Conv1D (in, out)."""
    return delta.T if fan_in_fan_out else delta


def _finite(contribution: Contribution, name: str) -> np.ndarray:
    array = np.asarray(getattr(contribution, name))
    if not all_finite(array):
        raise UpdateError(f"{name} of site {contribution.site!r}", "holds a NaN or an infinite value")
    return array.astype(np.float64)
