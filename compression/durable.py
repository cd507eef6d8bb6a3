"""A set of arrays and a small JSON document on disk, replaced as one atomic step. Never a pickle.

    write to a temporary name -> fsync -> rename over the old one -> fsync the directory

The file is a safetensors file whose metadata holds the document and an xxh3 of every array: a reader gets
either the state before or the state after, or StateError, never a mixture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from umbel.errors import UmbelError


class StateError(UmbelError):
    """A state file is damaged or of another kind; it must not be used and not be taken for an empty one."""


def save(path: Path, arrays: Mapping[str, np.ndarray], document: Mapping[str, Any]) -> None:
    """Replace `path` by these arrays and this JSON document. Durable when it returns."""
    from safetensors.numpy import save as serialise

    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    sums = {
        name: f"{xxhash.xxh3_64_intdigest(array.view(np.uint8).reshape(-1).data):016x}"
        for name, array in plain.items()
    }
    metadata = {"document": json.dumps(document, sort_keys=True), "xxh3": json.dumps(sums, sort_keys=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(serialise(plain, metadata=metadata))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays (copies) and the document of `path`. Raises StateError if anything does not fit."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in list(file.keys())}
        document, sums = json.loads(metadata["document"]), json.loads(metadata["xxh3"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise StateError(
            f"{path} is damaged, got {type(error).__name__}: {error}. Restore or remove it."
        ) from error
    for name, array in arrays.items():
        if sums.get(name) != _checksum(array):
            raise StateError(f"{path} is damaged: the checksum of {name!r} differs. Restore or remove it.")
    return arrays, document


def _checksum(array: np.ndarray) -> str:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{xxhash.xxh3_64_intdigest(raw.data):016x}"
