"""`sign(C)`: one bit per value times the mean magnitude of its chunk of C.

    C(x) = mean|x| * sgn(x), sgn(0) = +1        1 + 32/C bits per value

Per chunk 1 - NMSE = ||x||_1^2 / (C ||x||^2) >= 1/C, so the bound is Contractive(1/C). Sections: `scale`
(fp32 a chunk), `sign` (bit planes). Reference: Karimireddy et al. 2019 (scaled sign with error feedback).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compression.bounds import Bound, Contractive
from compression.codecs.base import (
    Encoded,
    PlainDecoder,
    expect_nnz,
    numel_of,
    padding_is,
    segments,
    take,
    words,
)
from compression.errors import FrameError
from compression.frame import FrameWriter
from compression.kernels import kernels
from compression.layout import TensorSpec
from compression.parallel import for_each
from compression.source import Places, Source
from compression.spec import Pipeline, stage


@dataclass(frozen=True)
class SignCodec:
    block: int

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline((stage("sign", block=self.block),))

    @property
    def align(self) -> int:
        return self.block

    @property
    def bound(self) -> Bound:
        return Contractive(1 / self.block)

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...]:
        blocks = numel_of(entries, self.block) // self.block
        return (("scale", 4 * blocks), ("sign", blocks * self.block // 8))

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded:
        (_, scale_bytes), (_, sign_bytes) = self.fixed_sections(source.entries)
        means = np.empty(scale_bytes // 4, np.float32)
        packed = writer.reserve(scale_bytes + sign_bytes)[scale_bytes:]

        def run(span: tuple[int, int]) -> None:
            start, stop = span
            first, last = start // self.block, stop // self.block
            x = source.segment(start, stop)
            counts = source.counts(start, stop)
            row = self.block // 8
            status = kernels(source.numel).sign_encode(
                x, self.block, counts, means[first:last], packed[first * row : last * row]
            )
            if status >= 0:
                source.check_finite(start, x)

        for_each(run, segments(source.numel))
        writer.reserve(scale_bytes)[:] = means.view(np.uint8)
        writer.advance(scale_bytes)
        writer.end_section("scale")
        writer.advance(sign_bytes)
        writer.end_section("sign")
        return Encoded(self.pipeline, source.num_values)

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> _Decoder:
        (_, scale_bytes), (_, sign_bytes) = self.fixed_sections(entries)
        scale, packed = take(views, scale=scale_bytes, sign=sign_bytes)
        expect_nnz(nnz, numel_of(entries))
        return _Decoder(self.block, words(scale, "<f4"), packed, Places(entries, self.block))


class _Decoder(PlainDecoder):
    def __init__(self, block: int, means: np.ndarray, packed: np.ndarray, places: Places) -> None:
        self.block, self.means, self.packed, self.places = block, means, packed, places

    def decode(self, start: int, out: np.ndarray) -> None:
        first, last = start // self.block, (start + out.size) // self.block
        packed = self.packed[first * self.block // 8 : last * self.block // 8]
        status = kernels(self.places.numel).sign_decode(self.means[first:last], packed, self.block, out)
        if status >= 0:
            raise FrameError("scale", f"chunk {first + status}")
        padding_is(self.places, start, out, False)
