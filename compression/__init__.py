"""The codec: a set of tensors into one frame of bytes and back, for every method and both directions.

    layout = Layout.from_arrays(arrays)
    frame = encode(arrays, layout, "int8(256,rtn)")
    arrays = decode(frame, layout)

Nothing here knows Flower except `compression.flower`.
"""

from compression.api import (
    accumulate,
    accumulate_many,
    check_policy,
    decode,
    encode,
    encode_into,
    predict_bytes,
    read_header,
)
from compression.errors import EncodeError, FrameError, NonFiniteError
from compression.frame import FrameHeader, FrameWriter, GroupHeader
from compression.layout import Layout, LayoutError, Role, TensorSpec
from compression.limits import DEFAULT_LIMITS, Limits
from compression.policy import Policy

__all__ = [
    "DEFAULT_LIMITS",
    "EncodeError",
    "FrameError",
    "FrameHeader",
    "FrameWriter",
    "GroupHeader",
    "Layout",
    "LayoutError",
    "Limits",
    "NonFiniteError",
    "Policy",
    "Role",
    "TensorSpec",
    "accumulate",
    "accumulate_many",
    "check_policy",
    "decode",
    "encode",
    "encode_into",
    "predict_bytes",
    "read_header",
]
