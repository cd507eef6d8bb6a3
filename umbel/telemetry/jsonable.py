"""Make any value safe to write as JSON, without importing the libraries the value may come from.

    number with .item()  -> int | float      (numpy scalars, one-element arrays, torch scalars)
    NaN, +Inf, -Inf      -> None             (JSON has no such numbers; a reader sees "not known")
    array, tensor        -> nested lists
    anything else        -> "<TypeName>"     (never its repr: that could hold training text)

A metric of an odd type must never cost the update it describes, so nothing here raises. It does not shorten
text: callers pass one-line reasons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from os import PathLike, fspath
from typing import Any

# Deeper than any event of ours; a structure that refers to itself ends here instead of in a RecursionError.
_MAX_DEPTH = 12


def jsonable(value: Any, _depth: int = 0) -> Any:
    """Return `value` as None, bool, int, finite float, str, list or dict with string keys. Never raises."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return jsonable(value.value, _depth + 1)
    if isinstance(value, str):
        # A lone surrogate cannot be encoded as UTF-8 and would lose the whole line.
        return str(value).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if _depth >= _MAX_DEPTH:
        return f"<{type(value).__name__}>"
    return _container(value, _depth + 1)


def _container(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {str(jsonable(k, depth)): jsonable(v, depth) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v, depth) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(v, depth) for v in value), key=str)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name), depth) for f in fields(value)}
    if isinstance(value, PathLike):
        return jsonable(fspath(value), depth)
    return _array(value, depth)


def _array(value: Any, depth: int) -> Any:
    """Numpy and torch values answer to `.item()` (one element) and `.tolist()` (any number of elements)."""
    for method in ("item", "tolist"):
        try:
            plain = getattr(value, method)()
        except Exception:
            continue
        if type(plain) is not type(value):
            return jsonable(plain, depth)
    return f"<{type(value).__name__}>"
