"""What an update's frame holds: the site's values where the codec is exact, else the change it made.

    exact policy   value    the trained tensors themselves, bit for bit
    lossy policy   delta    local minus global, float32; integers and bools as they are

A lossy codec is meant for changes: quantising a weight to 4 bits would destroy it, quantising what a round
changed does not. The server adds the decoded change to the state it sent (float32, before any averaging).

    delta = float32(local) - float32(global)          value' = float32(global) + decode(encode(delta))
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compression.api import check_policy, decode
from compression.bounds import Exact
from compression.errors import FrameError
from compression.frame import read_header
from compression.layout import Layout, Role, TensorSpec
from compression.limits import DEFAULT_LIMITS, Limits
from compression.policy import Policy
from compression.registry import build

Arrays = Mapping[str, np.ndarray]

VALUE, DELTA = "value", "delta"


def is_exact(policy: Policy | str) -> bool:
    """Return whether every codec of a policy returns the same bits."""
    return all(isinstance(build(pipeline).bound, Exact) for _, pipeline in check_policy(policy).rules)


def payload_of(policy: Policy | str) -> str:
    """Return 'value' or 'delta': what an update under this policy holds."""
    return VALUE if is_exact(policy) else DELTA


def delta_layout(layout: Layout) -> Layout:
    """Return the layout of a change: floating tensors in float32, a plain parameter becomes a DELTA."""
    return Layout(tuple(_delta_spec(entry) for entry in layout.entries))


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _delta_spec(entry: TensorSpec) -> TensorSpec:
    if not _is_floating(entry.dtype):
        return entry
    role = Role.DELTA if entry.role is Role.PARAM else entry.role
    return entry._replace(dtype="float32", role=role)


def change(values: Arrays, base: Arrays, layout: Layout) -> dict[str, np.ndarray]:
    """Return local minus global for floating tensors (float32) and the values themselves for the others."""
    found = {}
    for entry in layout.entries:
        value = np.asarray(values[entry.name])
        if _is_floating(entry.dtype):
            found[entry.name] = value.astype(np.float32) - np.asarray(base[entry.name]).astype(np.float32)
        else:
            found[entry.name] = value
    return found


def applied(delta: Arrays, base: Arrays, layout: Layout) -> dict[str, np.ndarray]:
    """Return the values that a change stands for: float32 where floating, the sent ones elsewhere."""
    return {
        entry.name: np.asarray(base[entry.name]).astype(np.float32) + delta[entry.name]
        if _is_floating(entry.dtype)
        else delta[entry.name]
        for entry in layout.entries
    }


def decode_update(
    frame: bytes | memoryview,
    layout: Layout,
    policy: Policy | str,
    base: Arrays,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> dict[str, np.ndarray]:
    """Return the values an update stands for; raises FrameError.

    The frame was made with `policy`, or with the exact codec: the better one is always welcome. Any other is
    refused.
    """
    asked, used = check_policy(policy), read_header(frame, limits).policy
    if used != asked.wire() and used != check_policy("exact").wire():
        raise FrameError("policy", f"the frame's codec {used[:80]} is not the one asked for ({asked})")
    if is_exact(used):
        return decode(frame, layout, limits=limits)
    wide = delta_layout(layout)
    return applied(decode(frame, wide, limits=limits), base, layout)
