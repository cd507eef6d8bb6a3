"""`lowrank(r)`: every matrix as P Q^T of rank r, by subspace iteration from a seeded start.

    repeat twice: P = orth(M Q), Q = M^T P        C(M) = P Q^T = P P^T M        32 r (n + m) / (n m) bits

C is an orthogonal projection, so it never enlarges the error (delta >= 0); the best rank r has delta >= r /
min(n, m). A tensor of more dimensions is seen as (first, rest). The product is summed over r in order, so
that all receivers get the same bits. Sections: `p`, `q` (fp32). Reference: PowerSGD, Vogels et al. 2019. It
keeps no warm start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compression.bounds import Bound, Contractive
from compression.codecs.base import Encoded, expect_nnz, take, words
from compression.errors import EncodeError, FrameError
from compression.finite import first_non_finite
from compression.frame import FrameWriter
from compression.layout import DTYPES, TensorSpec
from compression.rng import uniform
from compression.spec import Pipeline, stage

_ITERATIONS = 2


@dataclass(frozen=True)
class LowRankCodec:
    rank: int
    fresh = True

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline((stage("lowrank", rank=self.rank),))

    @property
    def bound(self) -> Bound:
        return Contractive(0.0)

    def _shape(self, entry: TensorSpec) -> tuple[int, int, int]:
        rows = entry.shape[0] if len(entry.shape) > 1 else 1
        columns = math.prod(entry.shape) // max(rows, 1)
        return rows, columns, min(self.rank, rows, columns)

    def num_kept(self, entries: Sequence[TensorSpec]) -> int:
        return sum(r * (n + m) for n, m, r in map(self._shape, entries))

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...]:
        shapes = [self._shape(entry) for entry in entries]
        return (("p", 4 * sum(n * r for n, _, r in shapes)), ("q", 4 * sum(m * r for _, m, r in shapes)))

    def encode_bytes(
        self,
        entries: Sequence[TensorSpec],
        parts: Sequence[np.ndarray],
        writer: FrameWriter,
        bases: None = None,
    ) -> Encoded:
        factors = [self._factors(entry, part) for entry, part in zip(entries, parts)]
        for kind, side in (("p", 0), ("q", 1)):
            for pair in factors:
                raw = np.ascontiguousarray(pair[side], "<f4").reshape(-1).view(np.uint8)
                writer.reserve(raw.size)[:] = raw
                writer.advance(raw.size)
            writer.end_section(kind)
        return Encoded(self.pipeline, self.num_kept(entries))

    def _factors(self, entry: TensorSpec, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n, m, r = self._shape(entry)
        matrix = part.reshape(n, m).astype(np.float64)
        q = uniform(0, m * r, entry.numel).reshape(m, r).astype(np.float64) - 0.5
        for _ in range(_ITERATIONS):
            p, _ = np.linalg.qr(matrix @ q)
            q = matrix.T @ p
        with np.errstate(over="ignore"):
            pair = p.astype(np.float32), q.astype(np.float32)
        if any(first_non_finite(side.reshape(-1)) >= 0 for side in pair):
            raise EncodeError(entry.name, "holds values too large to factorise. Send it exactly.")
        return pair

    def decode_bytes(
        self,
        views: dict[str, np.ndarray],
        entries: Sequence[TensorSpec],
        nnz: int,
        bases: None = None,
        out_parts: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        p_raw, q_raw = take(views, **dict(self.fixed_sections(entries)))
        expect_nnz(nnz, self.num_kept(entries))
        p_all, q_all = words(p_raw, "<f4"), words(q_raw, "<f4")
        if first_non_finite(p_all) >= 0 or first_non_finite(q_all) >= 0:
            raise FrameError("non_finite", "a factor")
        parts = list(out_parts) if out_parts else [np.empty(e.numel, DTYPES[e.dtype]) for e in entries]
        at_p = at_q = 0
        for entry, part in zip(entries, parts):
            n, m, r = self._shape(entry)
            p, q = p_all[at_p : at_p + n * r].reshape(n, r), q_all[at_q : at_q + m * r].reshape(m, r)
            at_p, at_q = at_p + n * r, at_q + m * r
            total = np.zeros((n, m), np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                for column in range(r):
                    total += p[:, column, None] * q[None, :, column]
                part[:] = total.reshape(-1)
        return parts
