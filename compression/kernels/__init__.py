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
_AUTO_NUMEL_HEAVY = 1 << 15
_choice = "auto"


def kernels(numel: int, *, heavy: bool = False) -> ModuleType:
    """The kernel module for a vector of `numel` elements; `heavy` marks loops that numpy runs symbol by
    symbol."""
    long_enough = numel >= (_AUTO_NUMEL_HEAVY if heavy else _AUTO_NUMEL)
    if _choice == "numba" or (_choice == "auto" and long_enough and has_numba()):
        return importlib.import_module("compression.kernels.fast")
    return importlib.import_module("compression.kernels.reference")


@lru_cache(maxsize=1)
def has_numba() -> bool:
    """True if numba is installed and fits the numpy in use."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        importlib.import_module("numba")
    except ImportError:
        return False
    return True


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
