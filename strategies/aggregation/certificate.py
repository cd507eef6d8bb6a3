"""How far the adapter that is served is from the mean of the products.

    error = | s B A + C - sum_i p_i s_i B_i A_i |_F / | sum_i p_i s_i B_i A_i |_F

Averaging A and B apart is not averaging B A (their difference is the covariance sum p_i (B_i - B)(A_i -
A)), so every round states this number. Norms come from triangular QR factors in float64: no out x in
matrix, and none of the cancellation that a Gram form suffers when the error is small. It says nothing about
the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.layers import pair_layers
from strategies.aggregation.products import Term, norm_of_sum

__all__ = ["factor_mean_error", "pair_layers", "relative_error"]

Layer = tuple[str, float, Sequence[tuple], np.ndarray, np.ndarray]


def relative_error(served: Sequence[Term], ideal: Sequence[Term]) -> tuple[float, float]:
    """Return (|served - ideal|_F, |ideal|_F) for two sums of (weight, B, A) of one layer."""
    difference = [*served, *((-w, b, a) for w, b, a in ideal)]
    return norm_of_sum(difference), norm_of_sum(ideal)


def factor_mean_error(layers: Iterable[Layer]) -> dict[str, Any]:
    """Measure what is served against the ideal, over all layers.

    Each layer is (name, scale, contributions, A_served [r, in], B_served [out, r]); a contribution is
    (p_i, A_i, B_i) at the layer's scale, or (p_i, A_i, B_i, s_i) with its own. The p_i are normalised here;
    their ranks may differ. Layers are read one at a time and may come from a generator.

    Returns `relative_error` (norms taken over all layers together), `worst_layer`, `worst_layer_error` and
    `layers`: name -> error. An ideal of norm zero gives 0.0 if the served one is zero too, else infinity.
    """
    errors: dict[str, float] = {}
    squared_error = squared_ideal = 0.0
    for name, scale, contributions, a_served, b_served in layers:
        error, ideal = relative_error([(scale, b_served, a_served)], _ideal(scale, contributions))
        errors[name] = _ratio(error, ideal)
        squared_error, squared_ideal = squared_error + error**2, squared_ideal + ideal**2
    worst = max(errors, key=lambda name: errors[name], default="")
    return {
        "relative_error": _ratio(math.sqrt(squared_error), math.sqrt(squared_ideal)),
        "worst_layer": worst,
        "worst_layer_error": errors.get(worst, 0.0),
        "layers": errors,
    }


def _ideal(scale: float, contributions: Sequence[tuple]) -> list[Term]:
    total = sum(float(c[0]) for c in contributions)
    if not total > 0:
        raise UpdateError("weights", "sum to nothing", got=total, allowed="> 0", remedy="Skip this layer.")
    return [(float(c[0]) / total * float(c[3] if len(c) > 3 else scale), c[2], c[1]) for c in contributions]


def _ratio(error: float, ideal: float) -> float:
    if ideal > 0:
        return error / ideal
    return 0.0 if error == 0 else math.inf
