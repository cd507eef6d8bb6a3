"""Tensors on disk as safetensors, for numpy arrays of every dtype that travels (bfloat16 included).

`safetensors.numpy` writes ml_dtypes' bfloat16 but cannot read it back, hence a reader of our own over the
library's parser. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors.numpy import save

_READ = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "U16": np.dtype("uint16"),
    "U32": np.dtype("uint32"),
    "U64": np.dtype("uint64"),
    "BOOL": np.dtype("bool"),
}


def dump_tensors(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the safetensors bytes of `arrays`, in sorted order of names."""
    ready = {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}
    for name, array in ready.items():
        if array.dtype not in _READ.values():
            raise TypeError(f"{name} has dtype {array.dtype}, which a tensor file cannot hold")
    return save(ready, dict(metadata) if metadata else None)


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[str, int]:
    """Write the safetensors file of `arrays`, one tensor after the other, and fsync it; return (sha256, bytes).

    No second copy of the tensors is made, as `dump_tensors` would. Raises OSError when the disk refuses.
    """
    names = {dtype: name for name, dtype in _READ.items()}
    header: dict[str, object] = {}
    ready, at = [], 0
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        if array.dtype not in names:
            raise TypeError(f"{name} has dtype {array.dtype}, which a tensor file cannot hold")
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        ready.append(array)
        at += array.nbytes
    text = json.dumps(header).encode()
    # The values begin at a multiple of eight.
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as handle:
        values: Iterator[Any] = (array.reshape(-1).view(np.uint8).data for array in ready)
        for part in (len(text).to_bytes(8, "little"), text, *values):
            digest.update(part)
            handle.write(part)
        handle.flush()
        os.fsync(handle.fileno())
    return digest.hexdigest(), 8 + len(text) + at


def load_tensors(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors buffer; raises safetensors' error on a damaged one."""
    return {
        name: np.frombuffer(bytes(entry["data"]), dtype=_READ[entry["dtype"]]).reshape(entry["shape"]).copy()
        for name, entry in deserialize(data)
    }
