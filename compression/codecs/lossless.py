"""`lossless` and `xor`: every bit survives. Bound: Exact.

A float word is rotated left by one bit, which gathers its exponent in the top byte and puts the sign beside
the mantissa; the bytes are split into planes. `lossless` sends the top plane through zstd and the others
raw: mantissas are noise. `xor` first takes the exclusive or with the same tensor of a base both sides hold,
so that unchanged bits become zeros, and sends every plane through zstd. Other dtypes: the raw bytes through
zstd. Blocks of 256 KiB each have their own statistics. The limit for dense bf16 weights is about 16/10.6 =
1.51: more must be lossy or a delta. References: ZipNN, Hershcovitch et al. 2024 (exponent planes).

Sections: `zlen` (u32 a zstd block), `zstd`, `raw` (lossless only).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compression import zstd
from compression.bounds import Bound, Exact
from compression.codecs.base import Encoded, expect_nnz, numel_of, take, words
from compression.codecs.exact import as_dtype
from compression.errors import EncodeError, FrameError
from compression.frame import FrameWriter
from compression.kernels import kernels
from compression.layout import DTYPES, FLOAT_DTYPES, TensorSpec
from compression.parallel import for_each
from compression.spec import Pipeline, stage

BLOCK_BYTES = 1 << 18
_PLANED: dict[int, Any] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class LosslessCodec:
    xor: bool = False
    fresh = True  # decoded arrays are nobody else's

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline((stage("xor" if self.xor else "lossless"),))

    @property
    def bound(self) -> Bound:
        return Exact()

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> None:
        return None

    def encode_bytes(
        self,
        entries: Sequence[TensorSpec],
        parts: Sequence[np.ndarray],
        writer: FrameWriter,
        bases: Sequence[np.ndarray] | None = None,
    ) -> Encoded:
        """`parts` (and `bases` for xor) are contiguous 1-D arrays of the entries' dtypes."""
        if self.xor and bases is None:
            raise EncodeError("", "xor needs base_arrays: the tensors the receiver is known to hold.")
        lengths: list[int] = []
        raws: list[np.ndarray] = []
        jobs = list(_blocks(entries))
        for first in range(0, len(jobs), 32):
            coded = for_each(lambda job: self._code(parts, bases, *job), jobs[first : first + 32])
            for squeezed, raw in coded:
                for piece in squeezed:
                    lengths.append(len(piece))
                    writer.reserve(len(piece))[:] = np.frombuffer(piece, np.uint8)
                    writer.advance(len(piece))
                raws.append(raw)
        writer.end_section("zstd")
        writer.section("zlen", np.array(lengths, "<u4"))
        if not self.xor:
            for raw in raws:
                writer.reserve(raw.size)[:] = raw
                writer.advance(raw.size)
            writer.end_section("raw")
        return Encoded(self.pipeline, numel_of(entries))

    def _code(
        self,
        parts: Sequence[np.ndarray],
        bases: Sequence[np.ndarray] | None,
        index: int,
        first: int,
        last: int,
        itemsize: int,
    ) -> tuple[list[bytes], np.ndarray]:
        """One block: (zstd frames, raw planes)."""
        piece = parts[index][first:last]
        if not itemsize:
            plain = piece.view(np.uint8)
            if self.xor:
                assert bases is not None
                plain = plain ^ bases[index][first:last].view(np.uint8)
            return [zstd.compress(plain)], np.zeros(0, np.uint8)
        word = piece.view(_PLANED[itemsize])
        if self.xor:
            assert bases is not None
            word = word ^ bases[index][first:last].view(_PLANED[itemsize])
        planes = kernels(word.size, heavy=True).split_planes(word)
        if self.xor:
            return [zstd.compress(plane) for plane in planes], np.zeros(0, np.uint8)
        return [zstd.compress(planes[-1])], planes[:-1].reshape(-1)

    def decode_bytes(
        self,
        views: dict[str, np.ndarray],
        entries: Sequence[TensorSpec],
        nnz: int,
        bases: Sequence[np.ndarray] | None = None,
        out_parts: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """1-D arrays in entry order, fresh or those of `out_parts`. Raises FrameError."""
        jobs = list(_blocks(entries))
        per_block = [(itemsize or 1) if self.xor else 1 for _, _, _, itemsize in jobs]
        if self.xor:
            squeezed, zlen = take(views, zstd=None, zlen=4 * sum(per_block))
            raw = np.zeros(0, np.uint8)
            if bases is None:
                raise FrameError("base", "xor needs the base's tensors, which this receiver did not give")
        else:
            raw_size = sum((last - first) * (itemsize - 1) for _, first, last, itemsize in jobs if itemsize)
            squeezed, zlen, raw = take(views, zstd=None, zlen=4 * len(jobs), raw=raw_size)
        expect_nnz(nnz, numel_of(entries))
        ends = np.concatenate([[0], np.cumsum(words(zlen, "<u4").astype(np.int64))])
        if ends[-1] != squeezed.size:
            raise FrameError("tiling", "zstd blocks do not fill their section")
        parts = [
            part.view(np.uint8) for part in out_parts or [np.empty(e.num_bytes, np.uint8) for e in entries]
        ]
        at, place = 0, 0
        for (index, first, last, itemsize), count in zip(jobs, per_block):
            frames = [squeezed[ends[i] : ends[i + 1]] for i in range(at, at + count)]
            at += count
            size = DTYPES[entries[index].dtype].itemsize
            out = parts[index][first * size : last * size]
            if not itemsize:
                out[:] = zstd.decompress(frames[0], out.size)
            else:
                width = last - first
                planes = [zstd.decompress(frame, width) for frame in frames]
                if not self.xor:
                    low = raw[place : place + (itemsize - 1) * width].reshape(itemsize - 1, width)
                    planes = [*low, *planes]
                    place += (itemsize - 1) * width
                kernels(width, heavy=True).join_planes(planes, out.view(_PLANED[itemsize]))
            if self.xor:
                assert bases is not None
                out ^= bases[index][first:last].view(np.uint8)
        return [as_dtype(part, entry) for part, entry in zip(parts, entries)]


def _blocks(entries: Sequence[TensorSpec]) -> Iterator[tuple[int, int, int, int]]:
    """(entry, first, last element, itemsize if it is cut into planes else 0) of every block."""
    for index, entry in enumerate(entries):
        size = DTYPES[entry.dtype].itemsize
        step = BLOCK_BYTES // size
        planed = size if entry.dtype in FLOAT_DTYPES and size in _PLANED else 0
        for first in range(0, entry.numel, step):
            yield index, first, min(first + step, entry.numel), planed
