"""Streaming weighted mean of named arrays: the sum under every averaging rule.

    received:  x = sum_i w_i x_i / sum_i w_i             over the sites that sent this tensor
    fixed:     x = g + sum_i w_i (x_i - g) / W           g = server value, W = weight expected of all

(FedAvg, McMahan et al. 2017, arXiv 1602.05629.) Sums run in float64 in the order of the calls, so the caller
fixes the bits by adding sites in a fixed order. Memory is one float64 copy of the tensors that were sent,
flat in the number of sites. To average deltas pass zeros as `like`.

Rules by dtype: floating tensors are averaged; integers take the maximum over the contributing sites (counters
such as `num_batches_tracked` never become 11.5); bools keep the server's value. A tensor is divided by the
weight of the sites that sent it, and keeps the server's value when nobody did.

It does not decide which updates count or how much (that is the round engine), and it does not clip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from strategies.aggregation.dtypes import all_finite, kind_of
from strategies.aggregation.errors import UpdateError
from umbel.errors import ConfigError

# Elements handled at a time: bounds the float64 temporaries to 8 MiB each whatever the tensor.
BLOCK = 1 << 20


def check_weight(weight: float) -> float:
    """Return the weight as a float; raises UpdateError unless it is a real, finite number >= 0."""
    real = isinstance(weight, (int, float, np.integer, np.floating)) and not isinstance(weight, bool)
    if not real or not math.isfinite(weight) or weight < 0:
        raise UpdateError("weight", "is not usable", got=weight, allowed="a finite number >= 0")
    return float(weight)


@dataclass
class _Sum:
    """Running state of one tensor. With one contributor `value` is that tensor itself, unweighted."""

    value: np.ndarray
    weight: float
    count: int = 1


class WeightedMean:
    """Weighted mean of mappings name -> array, one mapping at a time.

    `like` gives names, shapes, dtypes and the server's values; it is read, never written.
    `expected_weight` is W and needed for `normalise="fixed"` only.
    Raises ConfigError for an unknown `normalise` or a missing or non-positive W.
    """

    def __init__(
        self,
        like: Mapping[str, np.ndarray],
        *,
        normalise: Literal["received", "fixed"] = "received",
        expected_weight: float | None = None,
    ) -> None:
        if normalise not in ("received", "fixed"):
            raise ConfigError("normalise", "is unknown", got=normalise, allowed="'received', 'fixed'")
        usable = expected_weight is not None and math.isfinite(expected_weight) and expected_weight > 0
        if normalise == "fixed" and not usable:
            raise ConfigError(
                "expected_weight",
                "is needed with normalise = 'fixed'",
                got=expected_weight,
                allowed="a finite number > 0",
                remedy="Give the weight expected of the whole cohort.",
            )
        self._like = {name: np.asarray(value) for name, value in like.items()}
        self._kinds = {name: kind_of(value.dtype) for name, value in self._like.items()}
        self._fixed = normalise == "fixed"
        self._expected = float(expected_weight or 0.0)
        self._sums: dict[str, _Sum] = {}
        self.num_contributors = 0
        self.total_weight = 0.0

    def add(self, arrays: Mapping[str, np.ndarray], weight: float) -> None:
        """Add one site. A subset of the names is allowed; weight 0 counts as "not here".

        All or nothing: raises UpdateError (weight, unknown name, shape, kind of dtype, NaN or infinity)
        before a single element was added.
        """
        weight = check_weight(weight)
        for name, array in arrays.items():
            self._check(name, np.asarray(array))
        if weight == 0.0:
            return
        for name, array in arrays.items():
            self._add_one(name, np.asarray(array), weight)
        self.num_contributors += 1
        self.total_weight += weight

    def result(self) -> dict[str, np.ndarray]:
        """Return fresh arrays in the names, order, shapes and dtypes of `like`. May be called at any time."""
        return {name: self._finish(name, server) for name, server in self._like.items()}

    def coverage(self) -> dict[str, tuple[int, float]]:
        """Return name -> (number of sites, sum of their weights); (0, 0.0) where nobody sent the tensor."""
        return {n: (s.count, s.weight) if (s := self._sums.get(n)) else (0, 0.0) for n in self._like}

    def _check(self, name: str, array: np.ndarray) -> None:
        if name not in self._like:
            raise UpdateError(name, "is not a tensor of this run", allowed="the names of the server's state")
        want = self._like[name]
        if array.shape != want.shape:
            raise UpdateError(name, "has the wrong shape", got=array.shape, allowed=str(want.shape))
        if kind_of(array.dtype) != self._kinds[name]:
            got = array.dtype.name
            raise UpdateError(name, "has the wrong kind of dtype", got=got, allowed=want.dtype.name)
        if not all_finite(array):
            raise UpdateError(name, "holds a NaN or an infinite value", allowed="finite values")

    def _add_one(self, name: str, array: np.ndarray, weight: float) -> None:
        kind, state = self._kinds[name], self._sums.get(name)
        if state is None:
            # order="C": the blocks below are views of the flattened sum.
            value = array.astype(np.float64, order="C") if kind == "floating" else array.copy()
            self._sums[name] = _Sum(value, weight)
            return
        if kind == "integer":
            np.maximum(state.value, array, out=state.value)
        elif kind == "floating":
            if state.count == 1:
                state.value *= state.weight
            _add_scaled(state.value, array, weight)
        state.count += 1
        state.weight += weight

    def _finish(self, name: str, server: np.ndarray) -> np.ndarray:
        state = self._sums.get(name)
        if state is None or self._kinds[name] == "bool":
            return server.copy()
        if self._kinds[name] == "integer":
            return state.value.astype(server.dtype)
        out = np.empty(server.shape, server.dtype)
        flat, total, start = out.reshape(-1), state.value.reshape(-1), server.reshape(-1)
        for at in range(0, flat.size, BLOCK):
            block = slice(at, at + BLOCK)
            flat[block] = self._block(state, total[block], start[block])
        return out

    def _block(self, state: _Sum, total: np.ndarray, server: np.ndarray) -> np.ndarray:
        if not self._fixed:
            return total if state.count == 1 else total / state.weight
        base = server.astype(np.float64)
        weighted = total * state.weight if state.count == 1 else total
        return base + (weighted - state.weight * base) / self._expected


def _add_scaled(total: np.ndarray, array: np.ndarray, weight: float) -> None:
    """total += weight * array in float64, in blocks, so that no second model-sized temporary appears."""
    into, source = total.reshape(-1), np.ascontiguousarray(array).reshape(-1)
    for at in range(0, into.size, BLOCK):
        into[at : at + BLOCK] += weight * source[at : at + BLOCK].astype(np.float64)
