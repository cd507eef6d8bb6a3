"""From tokenised rows to the sequences one optimiser step runs over.

Rows are packed without padding. How long a packed sequence should be depends on the processor: attention costs
T^2 for T tokens, masked pairs included, so on a CPU eight rows of 256 tokens in one sequence pay for 2048^2 pairs
where 8 * 256^2 are wanted. There a sequence is only as long as the longest row of the step, or NARROW_TOKENS, below
which a matrix product wastes more than attention saves. A GPU gets `max_tokens`: it is fast where calls are few.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from umbel.data.packing import pack_rows, supervised_positions

NARROW_TOKENS = 256


class Sequence(NamedTuple):
    """One model call: int ids [T], positions [T], kept positions [K] and their next tokens [K]."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    keep: np.ndarray
    targets: np.ndarray


def wide_for(model: Any) -> bool:
    """Return whether long packed sequences are right for the model's device."""
    return next(model.parameters()).is_cuda


def sequences(rows: list[Any], *, max_tokens: int, packing: bool, wide: bool = False) -> list[Sequence]:
    """Return the sequences of `rows`; without packing each row is a sequence of its own.

    `wide` fills sequences up to `max_tokens`, otherwise they are narrow, as the module's docstring says.
    Sequences without a supervised position are left out: they would cost a pass and teach nothing.
    """
    if packing and not wide:
        longest = max((len(row.input_ids) for row in rows), default=0)
        max_tokens = min(max_tokens, max(longest, NARROW_TOKENS))
    groups = [rows] if packing else [[row] for row in rows]
    found = []
    for group in groups:
        for packed in pack_rows(group, max_tokens):
            keep, targets = supervised_positions(packed)
            if len(keep):
                found.append(Sequence(packed.input_ids, packed.position_ids, keep, targets))
    return found
