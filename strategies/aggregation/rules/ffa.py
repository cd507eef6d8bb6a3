"""FFA-LoRA: freeze a common A, average B. Exact: sum p_i s B_i A_0 = s B A_0.

Sun et al. 2024, arXiv 2403.12313. A_0 comes from the server once and never travels back. Expressiveness
depends on A_0 (orthonormal rows help); `refactor` is the FedSVD variant that moves the right singular vectors
into A after an aggregate (product unchanged).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strategies.aggregation.products import qr_svd
from strategies.aggregation.rules import sums
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Contribution, Factors, canonical, require_equal
from umbel.errors import ConfigError

CAPABILITIES = Capabilities(
    secure_sums=True,
    dp_linear=True,
    exact=True,
    server_optimizer=True,
    joiner_needs="A_0 or its seed, B",
)


def travelling_names(names: Iterable[str]) -> list[str]:
    """Return the names that a site sends: everything but the frozen A factors."""
    return [n for n in names if not n.endswith((".lora_A.weight", ".lora_embedding_A"))]


def summand(contribution: Contribution) -> sums.Total:
    """Return what one site adds to the total: its weight and w B."""
    return sums.summand(contribution.weight, {"B": contribution.b})


def from_total(total: sums.Total, frozen_a: np.ndarray) -> Factors:
    """Return (A_0, mean B)."""
    return Factors(frozen_a, sums.mean(total, "B"))


def aggregate(contributions: Iterable[Contribution], frozen_a: np.ndarray) -> Factors:
    """Return (A_0 untouched, B). Raises ConfigError if a site's A is not A_0 bit for bit, or scales differ."""
    kept = canonical(contributions)
    require_equal("ffa", kept)
    for c in kept:
        if not np.array_equal(c.a, frozen_a):
            raise ConfigError(
                "rule ffa",
                "needs the server's A at every site",
                got=c.site,
                allowed="A_0 bit for bit",
                remedy="Freeze A after the adapter is attached, and take A_0 from the server.",
            )
    return from_total(sums.add(map(summand, kept)), frozen_a)


def refactor(factors: Factors) -> Factors:
    """Return the same product with orthonormal rows in A (float64): A = V^T, B = U S."""
    rank = len(factors.a)
    low = qr_svd([(1.0, factors.b, factors.a)], rank)
    # Balanced factors carry sqrt(S) on both sides; all of it moves to B. A zero direction is completed by QR.
    root = np.sqrt(np.pad(low.singular_values, (0, max(0, rank - len(low.singular_values))))[:rank])
    floor = 1e-12 * float(root.max(initial=0.0))
    rows = np.divide(low.a, root[:, None], out=np.zeros_like(low.a), where=root[:, None] > floor)
    return Factors(_complete(rows, factors.a), low.b * root)


def _complete(rows: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Replace zero rows by directions of `candidates` orthogonal to all others."""
    out, pool = rows.copy(), list(np.concatenate([candidates.astype(np.float64), np.eye(rows.shape[1])]))
    for index in np.flatnonzero(~out.any(axis=1)):
        while pool:
            row = pool.pop(0)
            size = float(np.linalg.norm(row))
            for _ in range(2):  # once more against rounding
                row = row - out.T @ (out @ row)
            if np.linalg.norm(row) > 1e-8 * size > 0:
                out[index] = row / np.linalg.norm(row)
                break
    return out
