"""`randk(p)` and `randk(p,unbiased)`: a random fraction p of the coordinates, chosen by a seed both sides
share.

The support is {i : hash32(i XOR key) < p 2^32}; no index travels. Unscaled it is contractive with delta = p
in expectation; scaled by 1/p it is unbiased with omega = 1/p - 1. Linear for a common seed. Refused as a
pretraining recipe. One section `val`, fp32. Reference: Stich et al. 2018.
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
    segments,
    take,
    words,
)
from compression.errors import FrameError
from compression.frame import FrameWriter
from compression.layout import TensorSpec
from compression.rng import hash32
from compression.source import Source
from compression.spec import Pipeline, stage


@dataclass(frozen=True)
class RandKCodec:
    fraction: float
    scaling: str
    align = 1

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline((stage("randk", fraction=self.fraction, scaling=self.scaling),))

    @property
    def bound(self) -> Bound:
        return Unbiased(1 / self.fraction - 1) if self.scaling == "unbiased" else Contractive(self.fraction)

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> None:
        return None  # the support's size depends on the seed

    def support(self, start: int, stop: int, seed: int) -> np.ndarray:
        """Boolean mask of the coordinates kept in [start, stop)."""
        index = np.arange(start, stop, dtype=np.uint64).astype(np.uint32)
        return hash32(index, seed).astype(np.uint64) < np.uint64(round(self.fraction * 2**32))

    @property
    def scale(self) -> np.float32:
        return np.float32(1 / self.fraction if self.scaling == "unbiased" else 1.0)

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded:
        total = 0
        for start, stop in segments(source.numel):
            x = source.segment(start, stop)
            source.check_finite(start, x)
            with np.errstate(over="ignore"):
                kept = x[self.support(start, stop, seed)] * self.scale
            if not np.isfinite(kept).all():
                source.refuse(start, f"overflows fp32 when scaled by {self.scale:g}.")
            writer.reserve(4 * kept.size)[:] = kept.astype("<f4").view(np.uint8)
            writer.advance(4 * kept.size)
            total += kept.size
        writer.end_section("val")
        return Encoded(self.pipeline, total)

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> _Decoder:
        numel = numel_of(entries)
        counts = [int(self.support(*span, seed).sum()) for span in segments(numel)]
        (val,) = take(views, val=4 * sum(counts))
        expect_nnz(nnz, sum(counts))
        return _Decoder(self, words(val, "<f4"), np.cumsum([0, *counts]), seed)


class _Decoder(PlainDecoder):
    def __init__(self, codec: RandKCodec, values: np.ndarray, ends: np.ndarray, seed: int) -> None:
        self.codec, self.values, self.ends, self.seed = codec, values, ends, seed

    def decode(self, start: int, out: np.ndarray) -> None:
        block = start // SEGMENT
        mask = self.codec.support(start, start + out.size, self.seed)
        part = self.values[self.ends[block] : self.ends[block + 1]]
        if int(mask.sum()) != part.size:
            raise FrameError("nnz", f"block {block}")
        out[:] = 0
        out[mask] = part
