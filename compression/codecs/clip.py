"""`int8cb`: clip at mean +- 6 sigma, 256 equal bins, decode to each bin's mean. For interoperation, with no
promise.

Clipping voids every bound, so it carries no residual. Statistics are those of the whole group. Sections:
`table` (256 fp32 bin means), `sym` (one byte a value). Reference: PRIME, Jaghouar et al. 2024 (2412.01152).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compression.bounds import Bound, NoBound
from compression.codecs.base import Encoded, PlainDecoder, expect_nnz, numel_of, segments, take, words
from compression.frame import FrameWriter
from compression.kernels.ref_ecsq import lookup
from compression.layout import TensorSpec
from compression.source import Source
from compression.spec import Pipeline, stage


@dataclass(frozen=True)
class ClipCodec:
    align = 1
    pipeline = Pipeline((stage("int8cb"),))

    @property
    def bound(self) -> Bound:
        return NoBound("values beyond 6 sigma are clipped")

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...]:
        return (("table", 1024), ("sym", numel_of(entries)))

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded:
        low, width = self._range(source)
        sums, counts = np.zeros(256), np.zeros(256, np.int64)
        writer.reserve(1024)
        writer.advance(1024)
        for start, stop in segments(source.numel):
            x = source.segment(start, stop).astype(np.float64)
            symbols = np.clip((x - low) / width, 0, 255).astype(np.uint8)
            sums += np.bincount(symbols, weights=x, minlength=256)
            counts += np.bincount(symbols, minlength=256)
            writer.reserve(symbols.size)[:] = symbols
            writer.advance(symbols.size)
        middle = low + (np.arange(256) + 0.5) * width
        means = np.where(counts > 0, sums / np.maximum(counts, 1), middle)
        writer.patch(0, means.astype("<f4").view(np.uint8))
        writer.split_section(("table", 1024))
        writer.end_section("sym")
        return Encoded(self.pipeline, source.numel)

    def _range(self, source: Source) -> tuple[float, float]:
        total = square = 0.0
        for start, stop in segments(source.numel):
            x = source.segment(start, stop)
            source.check_finite(start, x)
            total += float(x.sum(dtype=np.float64))
            square += float(np.square(x, dtype=np.float64).sum())
        mean = total / max(source.numel, 1)
        sigma = max(square / max(source.numel, 1) - mean * mean, 0.0) ** 0.5
        return mean - 6 * sigma, max(12 * sigma / 256, 1e-300)

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> _Decoder:
        table, symbols = take(views, table=1024, sym=numel_of(entries))
        expect_nnz(nnz, numel_of(entries))
        return _Decoder(words(table, "<f4"), symbols)


class _Decoder(PlainDecoder):
    def __init__(self, table: np.ndarray, symbols: np.ndarray) -> None:
        self.table, self.symbols = table, symbols

    def decode(self, start: int, out: np.ndarray) -> None:
        lookup(self.symbols[start : start + out.size], self.table, out)
