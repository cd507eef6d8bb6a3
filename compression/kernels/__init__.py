"""Inner loops in two forms that give the same bytes: numpy (the truth, always there) and numba (optional,
fast).

`kernels(numel)` picks one. "auto" takes numba when it is installed and the vector is long enough to be
worth a compilation; small messages never wait for a compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType

_AUTO_NUMEL = 1 << 20  # below this many elements numpy is fast enough and needs no compilation
_choice = "auto"


def kernels(numel: int) -> ModuleType:
    """The kernel module for a vector of `numel` elements."""
    if _choice == "numba" or (_choice == "auto" and numel >= _AUTO_NUMEL and has_numba()):
        return importlib.import_module("compression.kernels.fast")
    return importlib.import_module("compression.kernels.reference")


@lru_cache(maxsize=1)
def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force "numpy", "numba" or "auto" for the duration of a block (tests and benchmarks)."""
    global _choice
    if name not in ("numpy", "numba", "auto"):
        raise ValueError(f"backend must be numpy, numba or auto, got {name!r}")
    before, _choice = _choice, name
    try:
        yield
    finally:
        _choice = before
