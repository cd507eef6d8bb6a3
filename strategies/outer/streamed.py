"""Merge and outer step straight from the frames, segment by segment: no update is ever dense.

    for each segment:   d = sum_i w_i decode(F_i) / sum_i w_i     (float64, in cache)
                        theta' = theta + outer step of d          (one pass, momentum in place)

Beside theta and theta' there is one segment and what the rule remembers: the server's peak is three models with
momentum and two without, whatever the number of sites. For frames of changes under one policy, averaged by weight,
through SGD or no optimiser; everything else takes the general way (`UmbelStrategy.aggregate`). Floats are float32;
integers take the largest value that a site has, booleans and what no site sent keep the server's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compression import Layout
from compression.summing import sums
from strategies.aggregation import fused
from strategies.aggregation.outer import SGD

# One segment in so many has its single updates looked at.
SAMPLED = 16

Arrays = Mapping[str, np.ndarray]


class Diverged(ArithmeticError):
    """The outer step left the range of float32; what the rule remembers is already changed."""


def takes(state: Arrays, outer: Any) -> bool:
    """Tell whether this state and optimiser can be served."""
    floats = all(
        v.dtype == np.float32 and v.flags.c_contiguous for v in state.values() if v.dtype.kind not in "iub"
    )
    return floats and (outer is None or isinstance(outer, SGD))


def merge(
    state: Arrays,
    frames: Sequence[bytes],
    layout: Layout,
    weights: Sequence[float],
    outer: SGD | None,
    names: Sequence[str] = (),
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (next state, gauges). `layout` is that of the changes; `names` of the sites go with the gauges.

    Raises Diverged when a value overflows: the caller's memory of the rule is spent then.
    """
    shares = [w / sum(weights) for w in weights]
    moved = {name: np.array(value, order="C") for name, value in state.items()}
    seen = Seen(len(frames))
    for piece in sums(frames, layout, shares, rows_of=lambda segment: segment % SAMPLED == 0):
        if piece.total is None:
            if moved[piece.name].dtype.kind in "iu":
                moved[piece.name] = np.max(piece.rows, axis=0).reshape(moved[piece.name].shape)
            continue
        into = moved[piece.name].reshape(-1)[piece.start : piece.start + piece.total.size]
        if piece.rows:
            seen.look(into, piece.total, piece.rows)
        _step(outer, piece.name, piece.start, moved[piece.name].size, into, piece.total)
        length = float(np.dot(into, into))
        if not np.isfinite(length):
            raise Diverged(f"{piece.name} is not finite after the outer step")
    return moved, seen.report(names)


def _step(outer: SGD | None, name: str, start: int, size: int, into: np.ndarray, delta: np.ndarray) -> None:
    if outer is None or outer.is_buffer(name):
        fused.sgd_delta(into, delta, None, 1.0, 0.0, False)
        return
    v = outer.momentum_of(name, size) if outer.momentum else None
    part = None if v is None else v[start : start + delta.size]
    fused.sgd_delta(into, delta, part, outer.lr, outer.momentum, outer.nesterov)


class Seen:
    """Gauges from the segments whose single updates passed by (`strategies.outer.gauges` says what they are)."""

    def __init__(self, num_sites: int) -> None:
        self._gram, self._with = np.zeros((num_sites, num_sites)), np.zeros(num_sites)
        self._merged = self._start = 0.0

    def look(self, start: np.ndarray, merged: np.ndarray, rows: Sequence[np.ndarray]) -> None:
        """Add one segment: values before the step, the merged delta, each site's delta."""
        self._start += float(np.dot(start, start))
        self._merged += float(np.dot(merged, merged))
        for i, row in enumerate(rows):
            self._with[i] += float(np.dot(row.astype(np.float64), merged))
            for j in range(i + 1):
                self._gram[i, j] += float(np.dot(row, rows[j]))

    def report(self, names: Sequence[str]) -> dict[str, Any]:
        """Return drift, cosine and to_merge; empty when nothing was seen."""
        lengths = np.sqrt(np.diag(self._gram))
        size = np.sqrt(self._start) or 1.0
        if not lengths.any():
            return {}
        found: dict[str, Any] = {"drift": {n: float(v / size) for n, v in zip(names, lengths, strict=False)}}
        moving = np.flatnonzero(lengths)
        if len(moving) > 1:
            pairs = [(i, j) for i in moving for j in moving if j < i]
            found["cosine"] = float(np.mean([self._gram[i, j] / (lengths[i] * lengths[j]) for i, j in pairs]))
            if self._merged > 0:
                cosines = self._with[moving] / (lengths[moving] * np.sqrt(self._merged))
                found["to_merge"] = float(np.mean(cosines))
        return found
