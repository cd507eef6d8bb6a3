"""FLoRA: stack the factors. Exact for any ranks and scales; the base moves.

    B = [B_1 .. B_N],  A = [p_1 s_1 A_1; ..; p_N s_N A_N],   D* = B A   at scale 1 (rank = alpha = sum r_i)

Wang et al. 2024, arXiv 2409.05976. Every site merges the stack into its base and starts a fresh adapter, so N
adapters go down each round, each site sees all the others' factors, and a quantised base would destroy the
merge.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strategies.aggregation.products import stack
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Contribution, Factors, ideal_terms, orient

CAPABILITIES = Capabilities(
    heterogeneous_rank=True,
    moves_base=True,
    stale_updates=False,
    safe_4bit=False,
    exact=True,
    joiner_needs="the base and all past stacks, or a dense checkpoint",
)


def aggregate(contributions: Iterable[Contribution]) -> Factors:
    """Return the stacked (A [R, in], B [out, R]) in float64; its scale is 1."""
    b, a = stack(ideal_terms(contributions))
    return Factors(a, b)


def merge(weight: np.ndarray, stacked: Factors, fan_in_fan_out: bool = False) -> np.ndarray:
    """Return weight + B A in the dtype of `weight`, transposed for a layer that stores (in, out)."""
    return (weight + orient(stacked.b @ stacked.a, fan_in_fan_out)).astype(weight.dtype)
