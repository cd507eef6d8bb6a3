"""From trained tensors to the frame that leaves: values or a change, with or without error feedback.

With a lossy codec and `compression.feedback` > 0 the site keeps what the codec dropped and adds it to its next
update (`compression.feedback`). The residual lies on the site's disk beside its other durable state; the server's
instruction names what became of earlier updates, and only that moves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

import compression
from compression.feedback import ErrorFeedback, frame_id
from compression.layout import Layout
from compression.payload import DELTA, VALUE, change, delta_layout, is_exact
from umbel.errors import Refusal, RefusalKind
from umbel.messages import Instruction, parse_json
from umbel.privacy.clip import clipped


def residual_file(layout: Layout, segment: tuple[int, int] = (0, 0)) -> str:
    """Return the name of the file that holds what was dropped from updates in `layout`.

    A method may send other tensors from round to round (one factor, one of several segments of equal length): each
    has a residual of its own, which waits until it is sent again.
    """
    index, count = segment
    which = f"-{index}of{count}" if count else ""
    return f"residual-{layout.digest()[:16]}{which}.safetensors"


class Encoded(NamedTuple):
    """One encoded update; `residual_ratio` is |residual| / |change| where a residual is kept."""

    frame: bytes
    payload: str
    residual_ratio: float | None = None


def encode_update(
    instruction: Instruction,
    values: Mapping[str, np.ndarray],
    layout: Layout,
    received: Mapping[str, np.ndarray],
    folder: Path,
    *,
    feedback: float,
    seed: int,
    clip_norm: float = 0.0,
    segment: tuple[int, int] = (0, 0),
) -> Encoded:
    """Encode what leaves (`values`, in `layout`) with the codec the instruction names.

    With `clip_norm` > 0 the change is brought to that L2 norm first (`umbel.privacy.clip`): what the codec gets is
    what may leave.
    `segment` (index, count) tells segments of one layout apart.
    A change is taken against exactly the bits that were `received`. Raises NonFiniteError naming a tensor, ConfigError
    for a codec that must not carry a residual, Refusal when a tensor to be sent as a change was never received.
    """
    up, index, base = instruction.up, instruction.round, instruction.base
    unknown = [entry.name for entry in layout.entries if entry.name not in received]
    if unknown and (clip_norm > 0 or not is_exact(up)):
        raise Refusal(
            RefusalKind.REFUSED,
            f"the codec {up!r} or the clip encodes changes, but {unknown[0]} was never received",
        )
    if clip_norm > 0:
        values = clipped(values, received, clip_norm)
    if is_exact(up):
        return Encoded(compression.encode(values, layout, up, seed=seed, round_index=index, base=base), VALUE)
    wide = delta_layout(layout)
    delta = change(values, received, layout)
    if feedback <= 0:
        return Encoded(compression.encode(delta, wide, up, seed=seed, round_index=index, base=base), DELTA)
    kept = ErrorFeedback(
        folder / residual_file(wide, segment),
        wide,
        up,
        key={"run": instruction.run, "site": instruction.site, "segment": f"{segment[0]}/{segment[1]}"},
        decay=feedback,
    )
    kept.settle(outcomes_by_frame(kept, instruction))
    frame = kept.encode(delta, round_index=index, attempt=instruction.attempt, seed=seed, base=base)
    norm = float(np.sqrt(sum(float(np.vdot(a, a)) for a in delta.values() if a.dtype.kind == "f")))
    return Encoded(frame, DELTA, kept.norm() / norm if norm else None)


def outcomes_by_frame(kept: ErrorFeedback, instruction: Instruction) -> dict[str, str]:
    """Return frame id -> outcome for the outcomes of the instruction that concern a pending frame."""
    found = {}
    for round_index, attempt, outcome in parse_json(instruction.outcomes, "outcomes"):
        frame = kept.pending_frame(int(round_index), int(attempt))
        if frame is not None:
            found[frame_id(frame)] = str(outcome)
    return found
