"""Frames in Flower's clothes: one frame is one `Array` whose stype says that it is not a tensor.

Flower chunks and hashes the buffer and passes it on untouched; its own `.numpy()` refuses an stype it does
not know, so a frame is never taken for numbers by accident. The only file of the codec that knows Flower.
"""

from __future__ import annotations

from flwr.app import Array

from compression.errors import FrameError

STYPE = "umbel/frame@1"
DTYPE = "uint8"


def frame_to_array(frame: bytes | memoryview) -> Array:
    """Wrap a frame: dtype "uint8", shape (n,), stype "umbel/frame@1"."""
    data = bytes(frame)
    return Array(dtype=DTYPE, shape=(len(data),), stype=STYPE, data=data)


def array_to_frame(array: Array) -> bytes:
    """Unwrap. Raises FrameError when stype, dtype or shape are not those of a frame."""
    if array.stype != STYPE:
        raise FrameError("stype", f"{array.stype!r}, expected {STYPE!r}")
    if array.dtype != DTYPE:
        raise FrameError("dtype", f"{array.dtype!r}, expected {DTYPE!r}")
    if not isinstance(array.data, bytes) or tuple(array.shape) != (len(array.data),):
        raise FrameError("shape", f"{tuple(array.shape)!r} for {len(array.data)} bytes")
    return array.data
