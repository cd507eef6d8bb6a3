"""Sums as the only thing a rule sees: what secure aggregation can deliver.

A site turns its update into a summand {"weight": w, name: w x}; summands are added (by the server, or by a
secure sum that hides the terms); the rule reads means off the total. A rule whose `from_total` takes such a
total and nothing else needs no single update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from strategies.aggregation.errors import UpdateError

WEIGHT = "weight"
Total = dict[str, np.ndarray]


def summand(weight: float, arrays: Mapping[str, np.ndarray]) -> Total:
    """Return {"weight": w, name: w x} in float64."""
    out: Total = {WEIGHT: np.array(float(weight))}
    for name, array in arrays.items():
        out[name] = np.asarray(weight * np.asarray(array, np.float64))
    return out


def add(summands: Iterable[Total]) -> Total:
    """Return the sum, name by name, in the order given; raises UpdateError if names or shapes differ."""
    total: Total = {}
    for part in summands:
        if not total:
            total = {name: array.copy() for name, array in part.items()}
            continue
        if {n: v.shape for n, v in part.items()} != {n: v.shape for n, v in total.items()}:
            raise UpdateError(
                "summand", "differs in names or shapes", got=sorted(part), allowed=str(sorted(total))
            )
        for name, array in part.items():
            total[name] += array
    if not total:
        raise UpdateError("summands", "are empty", remedy="Keep the state as it is.")
    return total


def mean(total: Total, name: str) -> np.ndarray:
    """Return sum w x / sum w of one name."""
    weight = float(total[WEIGHT])
    if not weight > 0:
        raise UpdateError(
            "weight", "sums to nothing", got=weight, allowed="> 0", remedy="Keep the state as it is."
        )
    return total[name] / weight
