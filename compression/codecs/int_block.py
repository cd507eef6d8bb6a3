"""`int8(B)`, `int4(B)`, `int2(B)` with `rtn` or `sr` rounding: absmax integer blocks.

    s = absmax / L, L = 2^(b-1) - 1, stored as bf16 rounded up      b + 16/B bits per value
    rtn: q = round-half-even(x / s)    |err| <= min(|x|, s/2),  contractive, delta >= 1/B
    sr:  q = floor(x / s + u)          |err| < s, unbiased,     omega <= B / (4 L^2)

Sections: `scale` (one bf16 a block), `sym` (packed by planes, see `ref_int`). The last block is filled with
zeros. A block whose scale would not be a normal number travels as scale +0 and zero symbols. Reference:
QSGD, Alistarh et al. 2017, with block scales. `sr` carries no residual; `rtn` may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compression.bounds import Bound, Contractive, Unbiased
from compression.codecs.base import (
    SEGMENT,
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
class IntBlockCodec:
    bits: int
    block: int
    rounding: str

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline((stage(f"int{self.bits}", block=self.block, rounding=self.rounding),))

    @property
    def align(self) -> int:
        return self.block

    @property
    def segment(self) -> int:
        """Elements per step: whole blocks only."""
        return max(SEGMENT // self.block, 1) * self.block

    @property
    def bound(self) -> Bound:
        levels = (1 << (self.bits - 1)) - 1
        if self.rounding == "sr":
            return Unbiased(self.block / (4 * levels**2))
        return Contractive(1 / self.block)

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...]:
        blocks = numel_of(entries, self.block) // self.block
        return (("scale", 2 * blocks), ("sym", blocks * self.block * self.bits // 8))

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded:
        (_, scale_bytes), (_, sym_bytes) = self.fixed_sections(source.entries)
        room = writer.reserve(scale_bytes + sym_bytes)
        scales, sym = room[:scale_bytes], room[scale_bytes:]
        word_buffer = np.empty(scale_bytes // 2, np.uint16)  # the room may be unaligned for 16-bit words

        def run(span: tuple[int, int]) -> None:
            start, stop = span
            x = source.segment(start, stop)
            first, last = start // self.block, stop // self.block
            row = self.block * self.bits // 8
            status = kernels(source.numel).int_encode(
                x,
                self.block,
                self.bits,
                self.rounding == "sr",
                start,
                seed,
                word_buffer[first:last],
                sym[first * row : last * row],
            )
            if status >= 0:
                self._refuse(source, start, x, status)

        for_each(run, segments(source.numel, self.segment))
        scales[:] = word_buffer.view(np.uint8)
        writer.advance(scale_bytes)
        writer.end_section("scale")
        writer.advance(sym_bytes)
        writer.end_section("sym")
        return Encoded(self.pipeline, source.num_values)

    def _refuse(self, source: Source, start: int, x: np.ndarray, status: int) -> None:
        index = start + status // 2 * self.block
        source.check_finite(index, x[index - start : index - start + self.block])
        source.refuse(index, f"holds values too large for int{self.bits} scales. Send it as fp32 (exact).")

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> _Decoder:
        (_, scale_bytes), (_, sym_bytes) = self.fixed_sections(entries)
        scale, sym = take(views, scale=scale_bytes, sym=sym_bytes)
        expect_nnz(nnz, numel_of(entries))
        return _Decoder(self, words(scale, "<u2"), sym, Places(entries, self.block))


class _Decoder(PlainDecoder):
    def __init__(self, codec: IntBlockCodec, scales: np.ndarray, sym: np.ndarray, places: Places) -> None:
        self.codec, self.scales, self.sym, self.places = codec, scales, sym, places
        self.segment = codec.segment

    def _slices(self, start: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        first, last = start // self.codec.block, (start + size) // self.codec.block
        row = self.codec.block * self.codec.bits // 8
        return self.sym[first * row : last * row], self.scales[first:last]

    def decode(self, start: int, out: np.ndarray) -> None:
        sym, scales = self._slices(start, out.size)
        status = kernels(self.places.numel).int_decode(sym, scales, self.codec.block, self.codec.bits, out)
        if status >= 0:
            block = start // self.codec.block + status // 2
            raise FrameError("symbol" if status % 2 else "scale", f"block {block}")
        padding_is(self.places, start, out, True)

    def accumulate(self, start: int, out: np.ndarray, weight: float) -> bool:
        if self.codec.bits != 8:
            return False
        sym, scales = self._slices(start, out.size)
        kernels(self.places.numel).int8_accumulate(sym, scales, self.codec.block, out, weight)
        return True
