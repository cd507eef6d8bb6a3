"""`dct(64)|topk(4096,k)|...`: top-k of the coefficients of a 64 x 64 cosine transform of every chunk of 4096.

The orthonormal DCT-II is an isometry, so that the bound is that of top-k (delta = k/4096 with exact
values). Sums run over the 64 terms in order, without a matrix library, so that every machine gets the same
bits. A chunk that a tensor does not fill is transformed with zeros behind it. Reference: DeMo, Peng et al.
2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from compression.bounds import Bound
from compression.codecs.base import Decoder, Encoded, PlainDecoder
from compression.codecs.topk import TopKCodec
from compression.frame import FrameWriter
from compression.layout import TensorSpec
from compression.source import Source
from compression.spec import Pipeline, stage

SIDE = 64
CHUNK = SIDE * SIDE


@lru_cache(maxsize=1)
def basis() -> np.ndarray:
    """Orthonormal DCT-II matrix, (64, 64) float32: row k is cos(pi (n + 1/2) k / 64), scaled."""
    n, k = np.arange(SIDE), np.arange(SIDE)[:, None]
    matrix = np.cos(np.pi * (n + 0.5) * k / SIDE) * np.sqrt(2 / SIDE)
    matrix[0] /= np.sqrt(2)
    return matrix.astype(np.float32)


def transform(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """M X M^T for every 64 x 64 chunk of a float32 vector, same shape."""
    cells = x.reshape(-1, SIDE, SIDE)
    for _ in range(2):  # rows, then (transposed) columns
        total = np.zeros_like(cells)
        for term in range(SIDE):
            total += matrix[None, :, term, None] * cells[:, term, None, :]
        cells = np.ascontiguousarray(total.transpose(0, 2, 1))
    return cells.reshape(-1)


def _whole(entries: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The entries as vectors of whole chunks: coefficients also live where the padding was."""
    return [e._replace(shape=(-(-e.numel // CHUNK) * CHUNK,)) for e in entries]


class _Coefficients(Source):
    """A source that shows transformed chunks."""

    def __init__(self, plain: Source) -> None:
        super().__init__(_whole(plain.entries), [], CHUNK)
        self.plain = plain

    def segment(self, start: int, stop: int) -> np.ndarray:
        x = self.plain.segment(start, stop)
        self.plain.check_finite(start, x)
        with np.errstate(over="ignore", invalid="ignore"):
            return transform(x, basis())


@dataclass(frozen=True)
class DctCodec:
    inner: TopKCodec
    align = CHUNK

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline((stage("dct"), *self.inner.pipeline.stages))

    @property
    def bound(self) -> Bound:
        return self.inner.bound

    def num_kept(self, entries: Sequence[TensorSpec]) -> int:
        return self.inner.num_kept(_whole(entries))

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...] | None:
        return self.inner.fixed_sections(_whole(entries))

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded:
        return Encoded(self.pipeline, self.inner.encode(_Coefficients(source), writer, seed).nnz)

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> Decoder:
        return _Decoder(self.inner.open(views, _whole(entries), nnz, seed))


class _Decoder(PlainDecoder):
    def __init__(self, inner: Decoder) -> None:
        self.inner, self.segment = inner, inner.segment

    def decode(self, start: int, out: np.ndarray) -> None:
        self.inner.decode(start, out)
        with np.errstate(over="ignore", invalid="ignore"):
            out[:] = transform(out, basis().T)
