"""FedSA-LoRA: share A only; every site keeps its own B.

    A = sum p_i A_i,   site i uses s B_i A

Guo et al. 2024, arXiv 2410.01463. There is no global model: the server cannot evaluate it and export is per
site. A new site starts with B = 0. B is the site's durable state and never travels.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strategies.aggregation.mean import check_weight
from strategies.aggregation.rules import sums
from strategies.aggregation.rules.capabilities import Capabilities

CAPABILITIES = Capabilities(
    secure_sums=True,
    global_model=False,
    server_optimizer=True,
    joiner_needs="A; its own B starts at 0",
)


def travelling_names(names: Iterable[str]) -> list[str]:
    """Return the names that a site sends: everything but its B factors."""
    return [n for n in names if not n.endswith((".lora_B.weight", ".lora_embedding_B"))]


def summand(weight: float, a: np.ndarray) -> sums.Total:
    """Return what one site adds to the total: its weight and w A."""
    return sums.summand(weight, {"A": a})


def from_total(total: sums.Total) -> np.ndarray:
    """Return the mean A."""
    return sums.mean(total, "A")


def aggregate(contributions: Iterable[tuple[str, float, np.ndarray]]) -> np.ndarray:
    """Return the mean A [r, in] in float64 of (site, weight, A), summed in site order."""
    kept = sorted((c for c in contributions if check_weight(c[1]) > 0), key=lambda c: c[0])
    return from_total(sums.add(summand(weight, a) for _, weight, a in kept))
