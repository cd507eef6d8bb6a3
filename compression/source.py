"""A group of tensors seen as one flat fp32 vector, read in pieces that fit a cache; and the way back.

Every tensor starts at a multiple of the codec's block (`align`), the gap is zeros that are never sent as
values: a block never mixes the scales of two tensors. `Source` hands out contiguous fp32 segments of that
padded vector (a view where it can, a scratch copy where it must); `Target` takes decoded segments into
fresh arrays. Neither holds a second copy of the whole group, and neither modifies the caller's arrays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from compression.errors import EncodeError, FrameError, NonFiniteError
from compression.finite import first_non_finite
from compression.kernels import kernels
from compression.layout import DTYPES, TensorSpec


def contiguous_parts(entries: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Each array as a contiguous 1-D array of its entry's dtype; copies only what is not so already."""
    return [np.ascontiguousarray(a, DTYPES[e.dtype]).reshape(-1) for e, a in zip(entries, arrays)]


class Places:
    """Where each entry lies in the padded vector. `starts[i]` is its first element, `numel` the padded
    length."""

    def __init__(self, entries: Sequence[TensorSpec], align: int = 1) -> None:
        self.entries = tuple(entries)
        self.align = align
        self.starts = [0]
        for entry in entries:
            self.starts.append(self.starts[-1] + -(-entry.numel // align) * align)
        self.numel = self.starts[-1]
        self.num_values = sum(entry.numel for entry in entries)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(entry, first, last) of the padded elements [start, stop) that hold values, in order."""
        index = max(bisect_right(self.starts, start) - 1, 0)
        while index < len(self.entries) and self.starts[index] < stop:
            first = max(start, self.starts[index])
            last = min(stop, self.starts[index] + self.entries[index].numel)
            if first < last:
                yield index, first, last
            index += 1

    def counts(self, start: int, stop: int) -> np.ndarray:
        """Number of real values in each block of the padded elements [start, stop), int64."""
        counts = np.zeros((stop - start) // self.align, np.int64)
        for _, first, last in self.pieces(start, stop):
            low, high = (first - start) // self.align, -(-(last - start) // self.align)
            counts[low:high] = self.align
            counts[high - 1] = last - start - (high - 1) * self.align
        return counts

    def name_at(self, index: int) -> str:
        """Name of the tensor that holds padded element `index`."""
        found = bisect_right(self.starts, index) - 1
        return self.entries[min(found, len(self.entries) - 1)].name


class Source(Places):
    """Read side. `entries` and `arrays` in the same order; arrays of any float dtype, contiguous or not."""

    def __init__(self, entries: Sequence[TensorSpec], arrays: Sequence[np.ndarray], align: int = 1) -> None:
        super().__init__(entries, align)
        self.parts = contiguous_parts(entries, arrays)

    def segment(self, start: int, stop: int) -> np.ndarray:
        """float32 values of the padded elements [start, stop); read-only by contract."""
        found = list(self.pieces(start, stop))
        if len(found) == 1 and found[0][1:] == (start, stop) and self.parts[found[0][0]].dtype == np.float32:
            offset = start - self.starts[found[0][0]]
            return self.parts[found[0][0]][offset : offset + stop - start]
        whole = sum(last - first for _, first, last in found) == stop - start
        out = np.empty(stop - start, np.float32) if whole else np.zeros(stop - start, np.float32)
        with np.errstate(over="ignore"):  # a float64 beyond fp32 becomes inf and is refused as such
            for index, first, last in found:
                begin = self.starts[index]
                out[first - start : last - start] = self.parts[index][first - begin : last - begin]
        return out

    def check_finite(self, start: int, segment: np.ndarray) -> None:
        """Raise NonFiniteError naming the tensor of the first bad value of a segment that begins at
        `start`."""
        if not kernels(self.numel).all_finite(segment):
            bad = first_non_finite(segment)
            raise NonFiniteError(
                self.name_at(start + bad), "holds a NaN or an infinite value. Nothing of it is sent."
            )

    def refuse(self, index: int, problem: str) -> None:
        """Raise EncodeError about the tensor that holds padded element `index`."""
        raise EncodeError(self.name_at(index), problem)


class Target(Places):
    """Write side: arrays of the entries' shapes and dtypes, sized by the receiver's layout alone."""

    def __init__(self, entries: Sequence[TensorSpec], parts: Sequence[np.ndarray], align: int = 1) -> None:
        super().__init__(entries, align)
        self.parts = parts

    def view(self, start: int, stop: int) -> np.ndarray | None:
        """The float32 destination of [start, stop) if it is one contiguous piece without padding, else
        None."""
        found = list(self.pieces(start, stop))
        if len(found) == 1 and found[0][1:] == (start, stop) and self.parts[found[0][0]].dtype == np.float32:
            offset = start - self.starts[found[0][0]]
            return self.parts[found[0][0]][offset : offset + stop - start]
        return None

    def put(self, start: int, values: np.ndarray) -> None:
        """Cast and store `values` from padded element `start` on. Raises FrameError if a narrower dtype
        overflows."""
        with np.errstate(over="ignore"):
            for index, first, last in self.pieces(start, start + values.size):
                begin = self.starts[index]
                part = self.parts[index][first - begin : last - begin]
                part[:] = values[first - start : last - start]
                if part.dtype != np.float32 and first_non_finite(part) >= 0:
                    raise FrameError("non_finite", self.entries[index].name)
