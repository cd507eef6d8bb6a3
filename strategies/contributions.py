"""The factors of all sites, tensor by tensor, without holding all sites in memory.

A certificate needs, layer by layer, the factors of every site at once; the engine hands them out site by site.
They are turned round through a temporary file: memory stays that of one layer times the sites, not of the
adapter times the sites.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

import numpy as np


class Contributions:
    """Append-only store of named tensors of one site after another; removed when the `with` block ends."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._weights: list[float] = []
        self._places: dict[str, list[tuple[int, tuple[int, ...], np.dtype]]] = {n: [] for n in names}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Contributions:
        if self._names:
            # Small adapters never touch the disk; large ones spill over by themselves.
            self._file = tempfile.SpooledTemporaryFile(max_size=64 * 2**20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, weight: float, arrays: Mapping[str, np.ndarray]) -> None:
        """Store one site's tensors."""
        if self._file is None:
            return
        self._weights.append(weight)
        for name in self._names:
            array = np.asarray(arrays[name], order="C")
            self._places[name].append((self._file.seek(0, 2), array.shape, array.dtype))
            self._file.write(array.tobytes())

    def of(self, name: str) -> list[tuple[float, np.ndarray]]:
        """Return (weight, tensor) of every site, in the order they were added."""
        assert self._file is not None
        found = []
        for weight, (offset, shape, dtype) in zip(self._weights, self._places[name], strict=True):
            self._file.seek(offset)
            size = int(np.prod(shape)) * dtype.itemsize
            found.append((weight, np.frombuffer(self._file.read(size), dtype=dtype).reshape(shape)))
        return found
