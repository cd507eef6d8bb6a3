"""What every codec looks like from outside.

A *vector codec* sees a group as one fp32 vector (`Source`) and writes named sections; opened on sections it
decodes any aligned segment of the vector. A *byte codec* moves the tensors' own bits and never converts a
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from compression.bounds import Bound
from compression.errors import FrameError
from compression.frame import FrameWriter
from compression.layout import TensorSpec
from compression.source import Places, Source
from compression.spec import Pipeline

SEGMENT = 1 << 18  # elements (1 MiB of fp32) per step of a pass; every stream restarts at these boundaries


@dataclass(frozen=True)
class Encoded:
    """What encoding a group decided: the pipeline as recorded in the frame, and how many values travel."""

    pipeline: Pipeline
    nnz: int


class Decoder(Protocol):
    """Decodes one group segment by segment; `segment` is the required alignment of `start`, in elements."""

    segment: int

    def decode(self, start: int, out: np.ndarray) -> None:
        """Fill `out` (float32, contiguous) with elements from `start` on. Raises FrameError."""

    def accumulate(self, start: int, out: np.ndarray, weight: float) -> bool:
        """Add weight * decoded to `out` (float64) in one pass; False means not offered, nothing done."""


class PlainDecoder:
    """Base for decoders without a fused accumulate."""

    segment = SEGMENT

    def decode(self, start: int, out: np.ndarray) -> None:
        raise NotImplementedError

    def accumulate(self, start: int, out: np.ndarray, weight: float) -> bool:
        return False


class VectorCodec(Protocol):
    bound: Bound
    align: int  # tensors start at multiples of this in the padded vector

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...] | None:
        """Sections as (kind, bytes) when their sizes follow from the layout alone, else None."""

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded: ...

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> Decoder:
        """Check every section's size against the layout and return the decoder. Raises FrameError."""


def segments(numel: int, size: int = SEGMENT) -> list[tuple[int, int]]:
    """(start, stop) pairs that cover [0, numel) in steps of `size`."""
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def numel_of(entries: Sequence[TensorSpec], align: int = 1) -> int:
    """Length of the vector in which every entry is padded to a multiple of `align`."""
    return sum(-(-entry.numel // align) * align for entry in entries)


def padding_is(places: Places, start: int, values: np.ndarray, fill: bool) -> None:
    """Refuse decoded values in the gaps between tensors that are negative, or (`fill`) that are not zero."""
    if places.num_values == places.numel:
        return
    gaps = np.ones(values.size, bool)
    for _, first, last in places.pieces(start, start + values.size):
        gaps[first - start : last - start] = False
    wrong = values[gaps] != 0 if fill else values[gaps] < 0
    if wrong.any():
        raise FrameError("padding", "bits between tensors are not zero")


def take(views: dict[str, np.ndarray], **sizes: int | None) -> list[np.ndarray]:
    """The named sections, exactly these, each of the given byte size (None = any). Raises FrameError."""
    if list(views) != list(sizes):
        raise FrameError("sections", f"{list(views)!r}, expected {list(sizes)!r}")
    for kind, size in sizes.items():
        if size is not None and views[kind].size != size:
            raise FrameError("section_size", f"{kind} has {views[kind].size} bytes, expected {size}")
    return list(views.values())


def expect_nnz(nnz: int, expected: int) -> None:
    if nnz != expected:
        raise FrameError("nnz", f"{nnz}, expected {expected}")


def words(view: np.ndarray, dtype: str) -> np.ndarray:
    """Reinterpret a section's bytes; copies only when the section is not aligned for the type."""
    wanted = np.dtype(dtype)
    if view.size % wanted.itemsize:
        raise FrameError("section_size", f"{view.size} bytes is no multiple of {wanted.itemsize}")
    if view.ctypes.data % wanted.itemsize:
        view = view.copy()
    return view.view(wanted)
