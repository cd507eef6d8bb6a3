"""Merge by direction and mean length, tensor by tensor (RDA, in arXiv 2604.21428).

    u = sum_i w_i delta_i / |delta_i|        merged = (sum_i w_i |delta_i|) u / |u|        zero where u is zero

A plain mean of directions that disagree is short; here the length of the sites' steps is kept and only the direction
is averaged. Read as "renormalised mean of unit directions"; the paper's text allows another reading. Embeddings take
the plain mean: their rows are sparse, and one norm for all of them says nothing. Sums are float64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

_EMBEDDING = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|lm_head)([._]|$)", re.IGNORECASE)


def is_embedding(name: str) -> bool:
    """Tell by its name whether a tensor is an embedding or the output head."""
    return _EMBEDDING.search(name) is not None


def merge(rows: Sequence[np.ndarray], weights: np.ndarray, *, plain: bool = False) -> np.ndarray:
    """Return the merged delta [d] float64 of rows [d]; `weights` [n] sum to 1, `plain` asks for the mean."""
    norms = np.array([np.sqrt(float(np.vdot(row, row))) for row in (r.astype(np.float64) for r in rows)])
    factors = weights if plain else np.divide(weights, norms, out=np.zeros_like(norms), where=norms > 0)
    total = np.zeros(len(rows[0]))
    for factor, row in zip(factors, rows, strict=True):
        total += factor * row.astype(np.float64)
    if plain:
        return total
    length = float(np.sqrt(np.vdot(total, total)))
    # Opposed directions cancel to rounding noise, which has no direction worth scaling up.
    if length <= 1e-12:
        return np.zeros_like(total)
    return total * (float(weights @ norms) / length)
