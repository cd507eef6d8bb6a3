"""Squared distances between updates: of vectors, or of adapters in the space of products.

    vectors:  D_ij = |x_i - x_j|^2, by differences (no cancellation for near twins)
    adapters: D_ij = G_ii + G_jj - 2 G_ij,  G_ij = sum over layers of s_i s_j tr(B_i^T B_j A_j A_i^T)

Factor distances mean nothing across sites (two gauges of one update are far apart); those of s B A do.
Krum, the geometric median, centred and norm clipping need nothing but D (or the norms) to find the
coefficients of their result, which is why one implementation serves full models and adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strategies.aggregation.products import Term
from strategies.aggregation.robust.common import column_blocks

# module -> (scale, B [out, r], A [r, in])
Adapter = Mapping[str, Term]


def squared_distances(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return D [n, n] float64 of n vectors, streamed over blocks of coordinates."""
    out = np.zeros((len(rows), len(rows)))
    for _, block in column_blocks(rows):
        for i in range(len(rows) - 1):
            step = block[i + 1 :] - block[i]
            out[i, i + 1 :] += np.einsum("ij,ij->i", step, step)
    return out + out.T


def squared_norms(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return |x_i|^2 [n] float64, streamed over blocks of coordinates."""
    out = np.zeros(len(rows))
    for _, block in column_blocks(rows):
        out += np.einsum("ij,ij->i", block, block)
    return out


def adapter_gram(adapters: Sequence[Adapter]) -> np.ndarray:
    """Return G [n, n], the inner products of the effective updates summed over the layers.

    Ranks and scales may differ; a layer that an adapter lacks counts as a zero update.
    """
    gram = np.zeros((len(adapters), len(adapters)))
    for module in sorted({m for adapter in adapters for m in adapter}):
        have = [i for i, adapter in enumerate(adapters) if module in adapter]
        terms = [adapters[i][module] for i in have]
        b = np.concatenate([s * np.asarray(b, np.float64) for s, b, _ in terms], axis=1)
        a = np.concatenate([np.asarray(a, np.float64) for _, _, a in terms], axis=0)
        # Entry by entry tr(B_i^T B_j A_j A_i^T) is the sum of one rank block of this product.
        starts = np.cumsum([0, *(len(t[2]) for t in terms)])[:-1]
        blocks = (b.T @ b) * (a @ a.T)
        gram[np.ix_(have, have)] += np.add.reduceat(np.add.reduceat(blocks, starts, 0), starts, 1)
    return gram


def adapter_squared_distances(adapters: Sequence[Adapter]) -> np.ndarray:
    """Return D [n, n] of the effective updates s B A; never negative, zero on the diagonal."""
    return distances_of_gram(adapter_gram(adapters))


def combined_terms(adapters: Sequence[Adapter], coefficients: Sequence[float], module: str) -> list[Term]:
    """Return sum_i c_i s_i B_i A_i of one layer as terms, for `stack` or `qr_svd`; zero coefficients are left out."""
    return [
        (float(c) * adapter[module][0], adapter[module][1], adapter[module][2])
        for c, adapter in zip(coefficients, adapters)
        if c != 0.0 and module in adapter
    ]


def distances_of_gram(gram: np.ndarray) -> np.ndarray:
    """Return D_ij = G_ii + G_jj - 2 G_ij, clipped at zero."""
    diagonal = np.diagonal(gram)
    out = np.maximum(diagonal[:, None] + diagonal[None, :] - 2 * gram, 0.0)
    np.fill_diagonal(out, 0.0)
    return (out + out.T) / 2


def distances_to_combination(squared: np.ndarray, coefficients: np.ndarray, origin: int = 0) -> np.ndarray:
    """Return |x_i - sum_j c_j x_j| [n] for coefficients of sum 1, from D alone.

    With G_ij = <x_i - o, x_j - o> = (D_io + D_oj - D_ij) / 2 it is sqrt(G_ii - 2 (G c)_i + c^T G c). The
    origin o must be a point near the honest ones: a far-away liar then only enters times its tiny
    coefficient, and cannot drown the honest distances in rounding.
    """
    gram = (squared[:, origin, None] + squared[None, origin] - squared) / 2
    spread = gram @ coefficients
    return np.sqrt(np.maximum(np.diagonal(gram) - 2 * spread + float(coefficients @ spread), 0.0))


def central_row(squared: np.ndarray) -> tuple[int, float]:
    """Return the row whose majority is nearest, and that distance: a scale that a minority cannot inflate."""
    majority = np.sort(squared, axis=1)[:, len(squared) // 2]
    return int(np.argmin(majority)), float(np.sqrt(majority.min()))
