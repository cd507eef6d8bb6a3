"""zstd used as an order-0 coder for byte planes, with the sizes a receiver needs to stay safe.

Every block is its own zstd frame with its content size. A receiver knows the size it expects, checks that
the frame states exactly that, and decompresses into no more. Matches are switched off as far as zstd
allows: quantised noise has none, and looking for them costs speed and bits.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from compression.errors import FrameError

_local = threading.local()


def _compressor() -> Any:
    if not hasattr(_local, "compressor"):
        import zstandard

        params = zstandard.ZstdCompressionParameters.from_level(
            1,
            strategy=zstandard.STRATEGY_FAST,
            window_log=18,
            hash_log=6,
            min_match=7,
            write_content_size=True,
        )
        _local.compressor = zstandard.ZstdCompressor(compression_params=params)
    return _local.compressor


def _decompressor() -> Any:
    if not hasattr(_local, "decompressor"):
        import zstandard

        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 20)
    return _local.decompressor


def compress(plane: np.ndarray) -> bytes:
    """One contiguous uint8 block -> one zstd frame with content size."""
    return _compressor().compress(plane.data)


def decompress(data: np.ndarray, size: int) -> np.ndarray:
    """Inverse of `compress`, (size,) uint8. Raises FrameError unless the frame holds exactly `size` bytes."""
    import zstandard

    try:
        if zstandard.get_frame_parameters(data.data).content_size != size:
            raise FrameError("zstd", "content size absent or not the expected one")
        plain = _decompressor().decompress(data.data, max_output_size=max(size, 1), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError("zstd", str(error)[:120]) from error
    if len(plain) != size:
        raise FrameError("zstd", f"{len(plain)} bytes, expected {size}")
    return np.frombuffer(plain, np.uint8)
