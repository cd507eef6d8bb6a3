"""`bf16`, `fp16`, `fp32`: round to nearest even into a narrower float and widen again at the other end.

Relative error <= 2^-8 (bf16) or 2^-11 (fp16) in the normal range; exact when the source already has that
dtype. Overflow is refused, not saturated. One section `half`. Sums never run in the wire dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from compression.bounds import Bound, Contractive
from compression.codecs.base import Encoded, PlainDecoder, expect_nnz, numel_of, segments, take, words
from compression.frame import FrameWriter
from compression.layout import TensorSpec
from compression.parallel import for_each
from compression.source import Source
from compression.spec import Pipeline, stage

WIRE = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
_RELATIVE = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 0.0}


@dataclass(frozen=True)
class CastCodec:
    name: str
    align = 1

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline((stage(self.name),))

    @property
    def bound(self) -> Bound:
        return Contractive(1 - _RELATIVE[self.name] ** 2)

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...]:
        return (("half", numel_of(entries) * WIRE[self.name].itemsize),)

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded:
        wire = WIRE[self.name]
        num_bytes = source.numel * wire.itemsize
        room = writer.reserve(num_bytes)

        def run(span: tuple[int, int]) -> None:
            start, stop = span
            x = source.segment(start, stop)
            source.check_finite(start, x)
            room[start * wire.itemsize : stop * wire.itemsize] = narrow(source, start, x, wire).view(np.uint8)

        for_each(run, segments(source.numel))
        writer.advance(num_bytes)
        writer.end_section("half")
        return Encoded(self.pipeline, source.numel)

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> _Decoder:
        (half,) = take(views, half=self.fixed_sections(entries)[0][1])
        expect_nnz(nnz, numel_of(entries))
        return _Decoder(words(half, WIRE[self.name].str if self.name != "bf16" else "<u2"), self.name)


class _Decoder(PlainDecoder):
    def __init__(self, values: np.ndarray, name: str) -> None:
        self.values, self.name = values, name

    def decode(self, start: int, out: np.ndarray) -> None:
        part = self.values[start : start + out.size]
        if self.name == "bf16":
            out.view(np.uint32)[:] = part
            out.view(np.uint32)[:] <<= np.uint32(16)
        else:
            out[:] = part


def narrow(source: Source, start: int, x: np.ndarray, wire: np.dtype) -> np.ndarray:
    """Cast finite fp32 to the wire dtype. Raises EncodeError naming the tensor that overflows."""
    with np.errstate(over="ignore", under="ignore"):
        half = x.astype(wire)
    if half.dtype != np.float32:
        finite = np.isfinite(half)
        if not finite.all():
            source.refuse(start + int(np.argmin(finite)), f"overflows {wire.name}. Send it as bf16 or exact.")
    return half
