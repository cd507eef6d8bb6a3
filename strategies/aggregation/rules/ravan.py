"""Ravan: several heads with frozen random outer factors; only small cores travel.

    D = sum_h c_h B_h H_h A_h;     a site sends c_h H_h;    G_h = mean over the sites that trained h;   c_h <-
    1

arXiv 2506.05568. Exact, since sum p c H is linear (averaging c and H apart is not). B_h and A_h follow from
one seed and never travel. A limited site trains some heads; a head nobody trained keeps its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.mean import check_weight
from strategies.aggregation.rules import sums
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Factors
from umbel.seeds import generator

CAPABILITIES = Capabilities(
    heterogeneous_rank=True,
    secure_sums=True,
    server_optimizer=True,
    dp_linear=True,
    exact=True,
    joiner_needs="the seed, all cores",
    note="mixed sizes by number of heads; the weight per head is summed too",
)


class Heads(NamedTuple):
    """Frozen outer factors: A [h, r, in], B [h, out, r] float32."""

    a: np.ndarray
    b: np.ndarray


def draw_heads(
    seed: int, module: str, shape: tuple[int, int], num_heads: int, rank: int, orthogonal: bool = True
) -> Heads:
    """Return heads for a layer [out, in]: normal with variance 1/in (A) and 1/out (B), or orthonormal across heads.

    The stream is counter based and keyed by seed and module; it does not depend on device, chunking or dtype.
    Raises UpdateError if `orthogonal` and num_heads * rank exceeds a side of the layer.
    """
    out, inp = shape
    total = num_heads * rank
    if orthogonal and total > min(shape):
        raise UpdateError(
            "heads", "span more than the layer", got=total, allowed=f"<= {min(shape)}", remedy="Use fewer."
        )
    a = generator(seed, "ravan", module, "A").standard_normal((total, inp), dtype=np.float32)
    b = generator(seed, "ravan", module, "B").standard_normal((total, out), dtype=np.float32)
    if orthogonal:
        a, b = (np.linalg.qr(x.T.astype(np.float64))[0].T.astype(np.float32) for x in (a, b))
    else:
        a, b = a / np.float32(np.sqrt(inp)), b / np.float32(np.sqrt(out))
    return Heads(a.reshape(num_heads, rank, inp), b.reshape(num_heads, rank, out).transpose(0, 2, 1))


def summand(weight: float, cores: Mapping[int, np.ndarray], num_heads: int, rank: int) -> sums.Total:
    """Return what one site adds: w c_h H_h for its heads, zeros elsewhere, and its weight per head."""
    array, covered = np.zeros((num_heads, rank, rank)), np.zeros(num_heads)
    for head, core in cores.items():
        array[head], covered[head] = core, 1.0
    return sums.summand(weight, {"H": array, "covered": covered})


def from_total(total: sums.Total, previous: np.ndarray) -> np.ndarray:
    """Return the cores [h, r, r] after the round."""
    covered = total["covered"][:, None, None]
    return np.where(covered > 0, total["H"] / np.where(covered > 0, covered, 1.0), previous)


def aggregate(
    previous: np.ndarray, contributions: Iterable[tuple[str, float, Mapping[int, np.ndarray]]]
) -> np.ndarray:
    """Return cores [h, r, r] in float64 from (site, weight, head -> c_h H_h), summed in site order."""
    kept = sorted((c for c in contributions if check_weight(c[1]) > 0), key=lambda c: c[0])
    heads, rank = previous.shape[:2]
    return from_total(sums.add(summand(w, cores, heads, rank) for _, w, cores in kept), previous)


def export(cores: np.ndarray, heads: Heads) -> Factors:
    """Return one plain adapter of scale 1: B = [B_1 H_1, ..], A = [A_1; ..]."""
    b = np.concatenate([heads.b[h].astype(np.float64) @ cores[h] for h in range(len(cores))], axis=1)
    return Factors(heads.a.reshape(-1, heads.a.shape[2]).astype(np.float64), b)
