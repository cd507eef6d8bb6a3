"""What a frame of split learning holds inside: one tensor in a codec, token counts, labels where they travel.

    payload = total u32, tokens u32, loss f64, rows u32, width u32, codec u8, labels u8; tensor; labels int32 [B, T]

    raw    float32                        4 bytes a value
    bf16   bfloat16                       2
    int8   round(x / s) with s = max|x| / 127 a token, stochastic     1, and 4 a token

The receiver checks B, T, d, codec and length against the instruction before it reads a value, and every value for being
finite. Nothing is unpickled. A residual is never kept: samples differ every step.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from umbel.split import SplitError

CODECS = ("raw", "bf16", "int8")
HEAD = struct.Struct("<IIdIIBB")


class Payload(NamedTuple):
    """One tensor [B, T, d] (torch, float32) and what goes with it; `labels` int32 [B, T] with -100, or None.

    `total` are the label tokens of the whole chunk, `tokens` those of this batch; `loss` is a sum over them.
    """

    tensor: Any
    total: int = 0
    tokens: int = 0
    loss: float = 0.0
    labels: np.ndarray | None = None


def encode_tensor(tensor: Any, codec: str, seed: int = 0) -> bytes:
    """Return a tensor's bytes in a codec; raises SplitError when a value is not finite."""
    import torch

    value = tensor.detach().float().cpu().contiguous()
    if not bool(torch.isfinite(value).all()):
        raise SplitError("a tensor at the cut is not finite")
    if codec == "raw":
        return value.numpy().tobytes()
    if codec == "bf16":
        return value.bfloat16().view(torch.int16).numpy().tobytes()
    scale = value.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127.0
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed % (2**63)))
    quantised = torch.floor(value / scale + noise).clamp_(-127, 127).to(torch.int8)
    return scale.numpy().tobytes() + quantised.numpy().tobytes()


def tensor_bytes(codec: str, rows: int, width: int, dimension: int) -> int:
    """Return how many bytes a tensor [rows, width, dimension] takes."""
    tokens = rows * width
    return tokens * (dimension + 4) if codec == "int8" else tokens * dimension * (2 if codec == "bf16" else 4)


def decode_tensor(data: memoryview, codec: str, rows: int, width: int, dimension: int) -> Any:
    """Return a float32 torch tensor [rows, width, dimension]; raises SplitError when it is not finite."""
    import torch

    shape = (rows, width, dimension)
    if codec == "int8":
        cut = 4 * rows * width
        scale = torch.from_numpy(np.frombuffer(data[:cut], np.float32).copy()).view(rows, width, 1)
        value = torch.from_numpy(np.frombuffer(data[cut:], np.int8).copy()).view(shape).float() * scale
    elif codec == "bf16":
        words = torch.from_numpy(np.frombuffer(data, np.int16).copy())
        value = words.view(torch.bfloat16).view(shape).float()
    else:
        value = torch.from_numpy(np.frombuffer(data, np.float32).copy()).view(shape)
    if not bool(torch.isfinite(value).all()):
        raise SplitError("a tensor that came over the cut is not finite")
    return value


def pack_payload(payload: Payload, codec: str, seed: int = 0) -> bytes:
    """Return the bytes of a payload."""
    rows, width, _ = payload.tensor.shape
    head = HEAD.pack(
        payload.total,
        payload.tokens,
        payload.loss,
        rows,
        width,
        CODECS.index(codec),
        int(payload.labels is not None),
    )
    labels = b"" if payload.labels is None else np.ascontiguousarray(payload.labels, "<i4").tobytes()
    return head + encode_tensor(payload.tensor, codec, seed) + labels


def unpack_payload(
    data: bytes, codec: str, dimension: int, *, max_rows: int, max_width: int, labels: bool
) -> Payload:
    """Return the payload; raises SplitError unless sizes, codec and labels are those agreed on."""
    if len(data) < HEAD.size:
        raise SplitError("a payload is shorter than its header")
    total, tokens, loss, rows, width, number, has_labels = HEAD.unpack_from(data)
    if not (0 < rows <= max_rows and 0 < width <= max_width):
        raise SplitError(f"a batch of {rows} x {width} exceeds the {max_rows} x {max_width} agreed on")
    if number >= len(CODECS) or CODECS[number] != codec or bool(has_labels) != labels:
        raise SplitError("a payload has another codec, or labels where none belong")
    size = tensor_bytes(codec, rows, width, dimension)
    if len(data) != HEAD.size + size + (4 * rows * width if labels else 0):
        raise SplitError(f"a payload of {len(data)} bytes does not hold {rows} x {width} x {dimension}")
    view = memoryview(data)[HEAD.size :]
    tensor = decode_tensor(view[:size], codec, rows, width, dimension)
    found = np.frombuffer(view[size:], "<i4").reshape(rows, width).copy() if labels else None
    if not np.isfinite(loss) or tokens > rows * width:
        raise SplitError("a payload's loss or token count is no such number")
    return Payload(tensor, total, tokens, loss, found)
