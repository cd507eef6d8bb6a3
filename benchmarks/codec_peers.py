"""Other people's codecs, run beside ours in the same process: what is importable here, nothing is required.

    torch (eager int8 and chunked top-k), zstandard on raw bf16, bitsandbytes (8-bit blocks, nf4), zipnn on bf16

Every peer gets at most 16 million of the values ours get, one thread, output included. Rates are (wall, cpu) GB/s of
input as in `benchmarks.codecs`; bits and NMSE are of the values that come back. A peer that is not installed has no
keys; `installed` says which there were.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

Rate = dict[str, Any]
Measure = Callable[[Callable[[], Any], int], tuple[float, float]]
PACKAGES = ("torch", "zstandard", "bitsandbytes", "zipnn")
MOST_VALUES = 1 << 24


def peer_rates(rate: Measure, x: np.ndarray, weights: np.ndarray) -> Rate:
    """Return the figures of every peer that is there; `x` float32, `weights` bfloat16."""
    part = np.ascontiguousarray(x[: min(x.size, MOST_VALUES) // 4096 * 4096])
    words = np.ascontiguousarray(weights[:MOST_VALUES]).view(np.uint8)
    there = [name for name in PACKAGES if importlib.util.find_spec(name)]
    found: Rate = {"installed": {name: importlib.metadata.version(name) for name in there}}
    makers = {"torch": _torch, "zstandard": _zstandard, "bitsandbytes": _bitsandbytes, "zipnn": _zipnn}
    for name in there:
        for key, work, amount, facts in makers[name](part, words):
            wall, cpu = rate(work, amount)
            found[key] = {"gb_s": wall, "cpu_gb_s": cpu, **facts}
    return found


Row = tuple[str, Callable[[], Any], int, Rate]


def _torch(x: np.ndarray, words: np.ndarray) -> list[Row]:
    import torch

    torch.set_num_threads(1)
    tensor = torch.from_numpy(x)

    def int8() -> None:
        rows = tensor.view(-1, 256)
        scale = rows.abs().amax(dim=1, keepdim=True) / 127
        torch.round(rows / scale.clamp_min(1e-30)).to(torch.int8)

    def topk() -> None:
        rows = tensor.view(-1, 4096)
        rows.gather(1, rows.abs().topk(64, dim=1, sorted=False).indices)

    return [("torch_int8_eager", int8, x.nbytes, {}), ("torch_topk_64_4096", topk, x.nbytes, {})]


def _zstandard(x: np.ndarray, words: np.ndarray) -> list[Row]:
    import zstandard

    plain = zstandard.ZstdCompressor(level=1)
    squeezed = plain.compress(words.data)
    ratio = {"ratio": words.size / len(squeezed)}
    return [
        ("zstd1_bf16_encode", lambda: plain.compress(words.data), words.size, ratio),
        ("zstd1_bf16_decode", lambda: zstandard.ZstdDecompressor().decompress(squeezed), words.size, {}),
    ]


def _bitsandbytes(x: np.ndarray, words: np.ndarray) -> list[Row]:
    import bitsandbytes.functional as bnb
    import torch

    torch.set_num_threads(1)
    tensor = torch.from_numpy(x)
    codes, state = bnb.quantize_blockwise(tensor, blocksize=256)
    packed, nf4 = bnb.quantize_4bit(tensor, blocksize=64, quant_type="nf4")

    def error(back: Any) -> float:
        return float(((back.double() - tensor.double()) ** 2).sum() / (tensor.double() ** 2).sum())

    eight = {"bits": 8 + 32 / 256, "nmse": error(bnb.dequantize_blockwise(codes, state))}
    four = {"bits": 4 + 32 / 64, "nmse": error(bnb.dequantize_4bit(packed, nf4))}
    return [
        ("bitsandbytes_8bit_encode", lambda: bnb.quantize_blockwise(tensor, blocksize=256), x.nbytes, eight),
        ("bitsandbytes_8bit_decode", lambda: bnb.dequantize_blockwise(codes, state), x.nbytes, {}),
        (
            "bitsandbytes_nf4_encode",
            lambda: bnb.quantize_4bit(tensor, blocksize=64, quant_type="nf4"),
            x.nbytes,
            four,
        ),
        ("bitsandbytes_nf4_decode", lambda: bnb.dequantize_4bit(packed, nf4), x.nbytes, {}),
    ]


def _zipnn(x: np.ndarray, words: np.ndarray) -> list[Row]:
    from zipnn import ZipNN

    coder = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    # It works in place on what it is given: every call gets a copy, whose cost is small beside it.
    raw = words.tobytes()
    squeezed = bytes(coder.compress(bytearray(raw)))
    assert bytes(coder.decompress(squeezed)) == raw
    ratio = {"ratio": words.size / len(squeezed)}
    return [
        ("zipnn_bf16_encode", lambda: coder.compress(bytearray(raw)), words.size, ratio),
        ("zipnn_bf16_decode", lambda: coder.decompress(squeezed), words.size, {}),
    ]
