"""The layout: which tensors travel, in which order, shape and type. Known to both sides, so it is never sent.

A `Layout` maps a set of named tensors onto one flat vector (entries one after the other, C order). Its
digest is the SHA-256 of its canonical JSON; sender and receiver compare digests before a byte of a frame is
decoded. It does not hold values, and it does not know how they are compressed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from compression.errors import EncodeError
from umbel.errors import UmbelError

_NUMPY_NAMES = ["float64", "float32", "float16", "bool", "int8", "int16", "int32", "int64"]
_NUMPY_NAMES += ["uint8", "uint16", "uint32", "uint64"]
DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in _NUMPY_NAMES}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)  # hazard H16: numpy itself has no bf16
FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})


class LayoutError(UmbelError, ValueError):
    """A layout cannot be built: a dtype that cannot travel, a name twice, or malformed JSON."""


class Role(StrEnum):
    """What a tensor is for; policies choose a codec by role and size."""

    PARAM = "param"
    DELTA = "delta"
    LORA_A = "lora_a"
    LORA_B = "lora_b"
    ACTIVATION = "activation"
    ACT_GRAD = "act_grad"
    BUFFER = "buffer"


class TensorSpec(NamedTuple):
    """One entry: `dtype` is a numpy or ml_dtypes name such as "float32", "bfloat16", "int64", "bool"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize


def role_of_name(name: str) -> Role:
    """Default role: PEFT's `lora_A` / `lora_B` by name, every other tensor a parameter."""
    if "lora_A" in name or "lora_embedding_A" in name:
        return Role.LORA_A
    if "lora_B" in name or "lora_embedding_B" in name:
        return Role.LORA_B
    return Role.PARAM


@dataclass(frozen=True)
class Layout:
    """Ordered tensor specs. `numel` counts elements of the flat vector, `raw_bytes` their size as they
    are."""

    entries: tuple[TensorSpec, ...]
    numel: int = field(init=False, compare=False)
    raw_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        entries = tuple(_checked(entry) for entry in self.entries)
        names = [entry.name for entry in entries]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise LayoutError(f"layout names a tensor twice, got {twice!r}. Every name must be unique.")
        object.__setattr__(self, "entries", entries)
        object.__setattr__(self, "numel", sum(entry.numel for entry in entries))
        object.__setattr__(self, "raw_bytes", sum(entry.num_bytes for entry in entries))

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], role: Callable[[str], Role] = role_of_name
    ) -> Layout:
        """Layout of a set of arrays, entries sorted by name. Raises LayoutError naming a tensor that cannot
        travel."""
        return cls(
            tuple(
                TensorSpec(name, tuple(map(int, np.shape(arrays[name]))), arrays[name].dtype.name, role(name))
                for name in sorted(arrays)
            )
        )

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of every entry in the flat vector, plus the total: `len(entries) + 1` numbers."""
        starts = [0]
        for entry in self.entries:
            starts.append(starts[-1] + entry.numel)
        return tuple(starts)

    def to_json(self) -> str:
        """Canonical JSON: no spaces, ASCII, fixed key order."""
        rows = [[e.name, list(e.shape), e.dtype, e.role.value] for e in self.entries]
        return json.dumps(
            {"entries": rows, "layout": 1}, separators=(",", ":"), ensure_ascii=True, sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Inverse of `to_json`. Raises LayoutError on anything that is not exactly such a document."""
        try:
            document = json.loads(text)
            layout = cls(tuple(_entry_from_row(row) for row in document["entries"]))
        except LayoutError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LayoutError(f"layout JSON is malformed, got {type(error).__name__}: {error}.") from error
        if layout.to_json() != text:
            raise LayoutError("layout JSON is not canonical. Use the text that Layout.to_json returned.")
        return layout

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.to_json().encode("ascii")).hexdigest()

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex characters."""
        return self._digest

    def flatten(self, arrays: Mapping[str, np.ndarray], dtype: Any = np.float32) -> np.ndarray:
        """Concatenate the arrays into one vector of shape (numel,) and the given dtype."""
        flat = np.empty(self.numel, dtype=dtype)
        for entry, start, array in zip(self.entries, self.offsets, self.ordered(arrays)):
            flat[start : start + entry.numel] = array.reshape(-1)
        return flat

    def unflatten(self, vec: np.ndarray) -> dict[str, np.ndarray]:
        """Cut a (numel,) vector into fresh arrays of the entries' shapes and dtypes; integers are rounded."""
        if vec.shape != (self.numel,):
            raise LayoutError(f"vector has the wrong shape, got {vec.shape!r}. Allowed: ({self.numel},).")
        result = {}
        for entry, start in zip(self.entries, self.offsets):
            part = vec[start : start + entry.numel].reshape(entry.shape)
            if entry.dtype == "bool":
                result[entry.name] = part != 0
                continue
            if entry.dtype not in FLOAT_DTYPES and part.dtype.kind not in "iub":
                part = np.rint(part)
            result[entry.name] = part.astype(DTYPES[entry.dtype])
        return result

    def ordered(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The arrays in layout order. Raises EncodeError naming a missing, extra or unlike tensor."""
        extra = sorted(set(arrays) - {entry.name for entry in self.entries})
        if extra:
            raise EncodeError(extra[0], "is not in the layout. Build the layout from what is sent.")
        return [_match(entry, arrays) for entry in self.entries]


def _match(entry: TensorSpec, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    if entry.name not in arrays:
        raise EncodeError(entry.name, "is in the layout but was not given.")
    array = arrays[entry.name]
    if tuple(np.shape(array)) != entry.shape:
        raise EncodeError(entry.name, f"has shape {np.shape(array)!r}, the layout says {entry.shape!r}.")
    if array.dtype.name != entry.dtype:
        raise EncodeError(entry.name, f"has dtype {array.dtype.name!r}, the layout says {entry.dtype!r}.")
    return np.asarray(array)


def _checked(entry: TensorSpec) -> TensorSpec:
    name, shape, dtype, role = entry
    if dtype not in DTYPES:
        raise LayoutError(
            f"tensor {name!r} has a dtype that cannot travel, got {dtype!r}. Allowed: "
            f"{', '.join(sorted(DTYPES))}. Cast it (8-bit floats to bfloat16) or leave it out of the update."
        )
    if any(size < 0 for size in shape):
        raise LayoutError(f"tensor {name!r} has a negative size, got {shape!r}.")
    return TensorSpec(name, tuple(int(size) for size in shape), dtype, Role(role))


def _entry_from_row(row: Iterable[Any]) -> TensorSpec:
    name, shape, dtype, role = row
    if not isinstance(name, str) or not all(type(size) is int for size in shape):
        raise LayoutError(f"layout row is malformed, got {row!r}.")
    return TensorSpec(name, tuple(shape), dtype, Role(role))
