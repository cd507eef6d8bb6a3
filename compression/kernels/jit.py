"""Compile on first use, for one declared signature, cached on disk.

An explicit signature keeps a kernel from being compiled again for another array layout; laziness keeps an
import from compiling anything. No fastmath: fp32 multiplies and adds stay single, in the order written,
never fused, so that the bytes equal those of the numpy kernels. `nogil` lets several segments run in threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_READ = re.compile(r"in:(\w+)")


class _Lazy:
    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self._signature = _READ.sub(r"Array(\1, 1, 'C', readonly=True)", signature)
        self._function = function
        self._compiled: Any = None
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled(*args)

    def _compile(self) -> Any:
        import numba

        options = {"nogil": True, "error_model": "numpy", "fastmath": False}
        try:
            return numba.njit(self._signature, cache=True, **options)(self._function)
        except RuntimeError:  # no place on this machine where a cache may be written
            return numba.njit(self._signature, **options)(self._function)


def kernel(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: `@kernel("int64(in:float32, uint8[::1])")`; `in:` is a contiguous array that is only
    read."""
    return lambda function: _Lazy(function, signature)
