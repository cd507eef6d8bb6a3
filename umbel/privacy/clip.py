"""Bounding what one site can change: the L2 norm of its whole update, over all tensors together.

    delta <- delta * min(1, C / ||delta||_2)

The norm runs over the floating tensors a site exchanges, as they are exchanged (factors are factors, not products),
in float64. Integers and flags do not take part: under privacy the server keeps its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]


def is_floating(array: np.ndarray) -> bool:
    """Return whether a tensor takes part; bfloat16 is a kind of its own to numpy."""
    return array.dtype.kind not in "iub"


def change_norm(values: Arrays, start: Arrays) -> float:
    """Return ||values - start||_2 over the floating tensors of `values`; may be NaN or infinite."""
    squared = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for name, value in values.items():
            if is_floating(value):
                change = value.astype(np.float64) - start[name].astype(np.float64)
                squared += float(np.vdot(change, change))
    return math.sqrt(squared) if squared >= 0 else math.nan


def clip_factor(norm: float, bound: float) -> float:
    """Return the factor in [0, 1] that brings `norm` to at most `bound`; 0 for a norm that is not finite."""
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= bound else bound / norm


def clipped(values: Arrays, start: Arrays, bound: float) -> dict[str, np.ndarray]:
    """Return `start + factor * (values - start)` in the dtypes of `values`; the very same arrays within the bound.

    Values that are not finite come back untouched, so that the encoder refuses them by name.
    """
    norm = change_norm(values, start)
    factor = clip_factor(norm, bound)
    if factor == 1.0 or not math.isfinite(norm):
        return dict(values)
    return {name: _moved(value, start.get(name), factor) for name, value in values.items()}


def _moved(value: np.ndarray, start: np.ndarray | None, factor: float) -> np.ndarray:
    if start is None or not is_floating(value):
        return value
    base = start.astype(np.float64)
    return (base + factor * (value.astype(np.float64) - base)).astype(value.dtype)
