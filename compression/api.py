"""encode, decode, accumulate: the whole codec as its callers see it. The sending side is in this file.

A frame is a pure function of (arrays, layout, policy, seed, round, base). Decoding is in `receive.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compression.errors import NonFiniteError
from compression.finite import all_finite
from compression.frame import FrameHeader, FrameWriter, GroupHeader, read_header
from compression.layout import Layout, TensorSpec
from compression.policy import Policy, parse_policy
from compression.receive import Arrays, accumulate, accumulate_many, decode
from compression.registry import build
from compression.rng import stream_key
from compression.source import Source, contiguous_parts

__all__ = [
    "Arrays",
    "accumulate",
    "accumulate_many",
    "check_policy",
    "decode",
    "encode",
    "encode_into",
    "predict_bytes",
    "read_header",
]


def check_policy(policy: Policy | str) -> Policy:
    """Parse a policy and build every codec it names. Raises ConfigError in words."""
    parsed = parse_policy(policy) if isinstance(policy, str) else policy
    for _, pipeline in parsed.rules:
        build(pipeline)
    return parsed


def encode(
    arrays: Arrays,
    layout: Layout,
    policy: Policy | str = "exact",
    *,
    seed: int = 0,
    round_index: int = 0,
    base: str = "",
    base_arrays: Arrays | None = None,
) -> bytes:
    """Encode named arrays into one frame.

    `arrays` match `layout` in name, shape and dtype; they may be non-contiguous and are not modified.
    `seed` feeds the random stages (derive it from run, round, site and direction), `round_index` counts
    from 1, `base` names the state a delta refers to. `base_arrays` (same layout) are needed by `xor` only.

    Raises EncodeError (NonFiniteError for NaN or infinity) with `.tensor`, ConfigError for an illegal policy.
    """
    writer = FrameWriter()
    frame = encode_into(
        writer, arrays, layout, policy, seed=seed, round_index=round_index, base=base, base_arrays=base_arrays
    )
    return bytes(frame)


def encode_into(
    writer: FrameWriter,
    arrays: Arrays,
    layout: Layout,
    policy: Policy | str = "exact",
    *,
    seed: int = 0,
    round_index: int = 0,
    base: str = "",
    base_arrays: Arrays | None = None,
) -> memoryview:
    """As `encode`, into a writer whose memory is reused; the view is valid until the writer's next use."""
    policy = check_policy(policy)
    ordered = layout.ordered(arrays)
    bases = layout.ordered(base_arrays) if base_arrays is not None else None
    writer.reset()
    groups = []
    for number, (pipeline, indices) in enumerate(policy.groups(layout)):
        codec = build(pipeline)
        entries = [layout.entries[i] for i in indices]
        chosen = [ordered[i] for i in indices]
        if hasattr(codec, "encode_bytes"):
            group_bases = (
                contiguous_parts(entries, [bases[i] for i in indices]) if bases is not None else None
            )
            encoded = codec.encode_bytes(entries, _finite_parts(entries, chosen), writer, group_bases)
        else:
            encoded = codec.encode(Source(entries, chosen, codec.align), writer, stream_key(seed, number))
        groups.append(GroupHeader(encoded.pipeline.wire(), encoded.nnz, writer.take_sections()))
    return writer.finish(
        FrameHeader(layout.digest(), layout.numel, policy.wire(), seed, round_index, base, tuple(groups))
    )


def predict_bytes(
    layout: Layout, policy: Policy | str, *, seed: int = 0, round_index: int = 0, base: str = ""
) -> int | None:
    """Exact frame size in bytes for fixed-rate policies, else None. Seed, round and base count by their
    digits."""
    policy = check_policy(policy)
    groups = []
    for pipeline, indices in policy.groups(layout):
        codec = build(pipeline)
        entries = [layout.entries[i] for i in indices]
        sections = codec.fixed_sections(entries)
        if sections is None:
            return None
        nnz = codec.num_kept(entries) if hasattr(codec, "num_kept") else sum(e.numel for e in entries)
        groups.append(GroupHeader(pipeline.wire(), nnz, sections))
    header = FrameHeader(layout.digest(), layout.numel, policy.wire(), seed, round_index, base, tuple(groups))
    return 12 + len(header.to_bytes()) + sum(n for g in groups for _, n in g.sections) + 8


def _finite_parts(entries: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    parts = contiguous_parts(entries, arrays)
    for entry, part in zip(entries, parts):
        if not all_finite(part):
            raise NonFiniteError(entry.name, "holds a NaN or an infinite value. Nothing of it is sent.")
    return parts
