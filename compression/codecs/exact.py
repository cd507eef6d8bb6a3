"""`exact`: the tensors' own bytes, one after the other. Bound: Exact.

Keeps every dtype bit for bit: bf16, fp16, integers, booleans, 0-d and empty tensors (hazards H14, H16). It
does not compress; `lossless` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compression.bounds import Bound, Exact
from compression.codecs.base import Encoded, expect_nnz, numel_of, take
from compression.errors import FrameError
from compression.frame import FrameWriter
from compression.layout import DTYPES, TensorSpec
from compression.spec import Pipeline, Stage


class ExactCodec:
    """A byte codec: one section `raw`."""

    bound: Bound = Exact()
    fresh = False  # decoded arrays may be views on the frame
    pipeline = Pipeline((Stage("exact"),))

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...]:
        return (("raw", sum(entry.num_bytes for entry in entries)),)

    def encode_bytes(
        self,
        entries: Sequence[TensorSpec],
        parts: Sequence[np.ndarray],
        writer: FrameWriter,
        bases: None = None,
    ) -> Encoded:
        """`parts` are contiguous 1-D arrays of the entries' dtypes."""
        for part in parts:
            raw = part.view(np.uint8)
            writer.reserve(raw.size)[:] = raw
            writer.advance(raw.size)
        writer.end_section("raw")
        return Encoded(self.pipeline, numel_of(entries))

    def decode_bytes(
        self,
        views: dict[str, np.ndarray],
        entries: Sequence[TensorSpec],
        nnz: int,
        bases: None = None,
        out_parts: None = None,
    ) -> list[np.ndarray]:
        """Read-only views on the frame (or copies where alignment asks for one), 1-D, in entry order."""
        (raw,) = take(views, raw=self.fixed_sections(entries)[0][1])
        expect_nnz(nnz, numel_of(entries))
        parts, position = [], 0
        for entry in entries:
            piece = raw[position : position + entry.num_bytes]
            position += entry.num_bytes
            parts.append(as_dtype(piece, entry))
        return parts


def as_dtype(raw: np.ndarray, entry: TensorSpec) -> np.ndarray:
    """Reinterpret raw bytes as the entry's dtype. A boolean byte other than 0 or 1 is refused."""
    dtype = DTYPES[entry.dtype]
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    if entry.dtype == "bool" and raw.size and raw.max() > 1:
        raise FrameError("bool", entry.name)
    return raw.view(dtype)
