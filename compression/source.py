"""A group of tensors seen as one flat fp32 vector, read in pieces that fit a cache; and the way back.

`Source` hands out contiguous fp32 segments of the arrays to be encoded (a view where it can, a scratch copy
where it must); `Target` writes decoded segments into fresh arrays. Neither ever holds a second copy of the
whole group, and neither modifies the caller's arrays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from compression.errors import EncodeError, FrameError, NonFiniteError
from compression.layout import DTYPES, TensorSpec


def offsets_of(entries: Sequence[TensorSpec]) -> list[int]:
    """Start of every entry inside the group, plus the total."""
    starts = [0]
    for entry in entries:
        starts.append(starts[-1] + entry.numel)
    return starts


class Source:
    """Read side. `entries` and `arrays` in the same order; arrays of any float dtype, contiguous or not."""

    def __init__(self, entries: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> None:
        self.entries = tuple(entries)
        self.parts = [np.ascontiguousarray(a, DTYPES[e.dtype]).reshape(-1) for e, a in zip(entries, arrays)]
        self.starts = offsets_of(entries)
        self.numel = self.starts[-1]

    def segment(self, start: int, stop: int, pad_to: int = 0) -> np.ndarray:
        """float32 values [start, stop), followed by zeros up to `pad_to` values; read-only by contract."""
        first = bisect_right(self.starts, start) - 1
        size = stop - start
        if stop <= self.starts[first + 1] and self.parts[first].dtype == np.float32 and size >= pad_to:
            offset = start - self.starts[first]
            return self.parts[first][offset : offset + size]
        out = np.zeros(max(pad_to, size), np.float32)
        position, index = start, first
        with np.errstate(over="ignore"):  # a float64 beyond fp32 becomes inf and is refused as such
            while position < stop:
                end = min(stop, self.starts[index + 1])
                part = self.parts[index][position - self.starts[index] : end - self.starts[index]]
                out[position - start : end - start] = part
                position, index = end, index + 1
        return out

    def name_at(self, index: int) -> str:
        """Name of the tensor that holds element `index` of the group."""
        return self.entries[bisect_right(self.starts, index) - 1].name

    def check_finite(self, start: int, segment: np.ndarray) -> None:
        """Raise NonFiniteError naming the tensor of the first bad value of a segment that begins at
        `start`."""
        finite = np.isfinite(segment)
        if not finite.all():
            self.refuse_non_finite(start + int(np.argmin(finite)))

    def refuse_non_finite(self, index: int) -> None:
        raise NonFiniteError(self.name_at(index), "holds a NaN or an infinite value. Nothing of it is sent.")

    def refuse(self, index: int, problem: str) -> None:
        raise EncodeError(self.name_at(index), problem)


class Target:
    """Write side: fresh arrays of the entries' shapes and dtypes, sized by the receiver's layout alone."""

    def __init__(self, entries: Sequence[TensorSpec]) -> None:
        self.entries = tuple(entries)
        self.parts = [np.empty(e.numel, DTYPES[e.dtype]) for e in entries]
        self.starts = offsets_of(entries)
        self.numel = self.starts[-1]

    def view(self, start: int, stop: int) -> np.ndarray | None:
        """The float32 destination of [start, stop) if it is one contiguous piece, else None."""
        first = bisect_right(self.starts, start) - 1
        if stop <= self.starts[first + 1] and self.parts[first].dtype == np.float32:
            return self.parts[first][start - self.starts[first] : stop - self.starts[first]]
        return None

    def put(self, start: int, values: np.ndarray) -> None:
        """Cast and store `values` at element `start`. Raises FrameError if a narrower dtype overflows."""
        stop, position = start + values.size, start
        index = bisect_right(self.starts, start) - 1
        with np.errstate(over="ignore"):
            while position < stop:
                end = min(stop, self.starts[index + 1])
                part = self.parts[index][position - self.starts[index] : end - self.starts[index]]
                part[:] = values[position - start : end - start]
                if part.dtype != np.float32 and not np.isfinite(part).all():
                    raise FrameError("non_finite", self.entries[index].name)
                position, index = end, index + 1

    def arrays(self) -> dict[str, np.ndarray]:
        """The finished arrays by name."""
        return {e.name: part.reshape(e.shape) for e, part in zip(self.entries, self.parts)}
