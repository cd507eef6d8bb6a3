"""From tokenised rows to the batches one optimiser step runs over: rows -> sequences -> batches.

Rows are packed without padding. How long a packed sequence should be depends on the processor: attention costs
T^2 for T tokens, masked pairs included, so on a CPU eight rows of 256 tokens in one sequence pay for 2048^2 pairs
where 8 * 256^2 are wanted. There a sequence is only as long as the longest row of the step, or NARROW_TOKENS, below
which a matrix product wastes more than attention saves. A GPU gets `max_tokens`: it is fast where calls are few.

Sequences of nearly one length are then run together, right padded. No mask is needed for that: no token sees a
later one, and nothing is kept of the padding. Positions are given only where a sequence holds several rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from umbel.data.packing import pack_rows, supervised_positions

NARROW_TOKENS = 256


# Tokens of a batch on a CPU at most: more of them leave the caches (SmolLM2-135M, 2 cores: 252 tokens a second with
# 4 x 256, 223 with 8 x 256, 214 one by one).
CPU_TOKENS = 1024
# Share of padding in a batch at most.
PADDING = 0.1


class Sequence(NamedTuple):
    """One packed sequence: int ids [T], positions [T], kept positions [K] and their next tokens [K]."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    keep: np.ndarray
    targets: np.ndarray

    @property
    def joined(self) -> bool:
        """Whether it holds more than one row."""
        return int((self.position_ids == 0).sum()) > 1


class Batch(NamedTuple):
    """One model call: int ids [B, T], positions [B, T] or None for 0..T-1; logits at (rows[i], keep[i]) predict
    targets[i], all [K]."""

    input_ids: np.ndarray
    position_ids: np.ndarray | None
    rows: np.ndarray
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


def batches(found: list[Sequence], *, max_tokens: int, wide: bool = False) -> list[Batch]:
    """Return the sequences as batches of at most `max_tokens` tokens, padding included; every sequence is in one.

    Not `wide`: of at most CPU_TOKENS, or one sequence.
    """
    max_tokens = max_tokens if wide else min(max_tokens, CPU_TOKENS)
    groups: list[list[Sequence]] = []
    # Like with like: a sequence that holds several rows makes its whole batch pay for a mask.
    for s in sorted(found, key=lambda s: (s.joined, -len(s.input_ids))):
        group = groups[-1] if groups else []
        if group and group[0].joined == s.joined and _fits([*group, s], max_tokens):
            group.append(s)
        else:
            groups.append([s])
    return [_padded(group) for group in groups]


def _fits(group: list[Sequence], max_tokens: int) -> bool:
    padded = len(group) * len(group[0].input_ids)
    return padded <= max_tokens and sum(len(s.input_ids) for s in group) >= (1.0 - PADDING) * padded


def _padded(group: list[Sequence]) -> Batch:
    width = len(group[0].input_ids)
    ids = np.zeros((len(group), width), np.int64)
    # Padding counts from 0 again: a row of its own, which nobody looks at.
    positions = np.tile(np.arange(width, dtype=np.int64), (len(group), 1))
    for i, s in enumerate(group):
        size = len(s.input_ids)
        ids[i, :size], positions[i, :size] = s.input_ids, s.position_ids
        positions[i, size:] = np.arange(width - size)
    return Batch(
        ids,
        positions if group[0].joined else None,
        np.repeat(np.arange(len(group)), [len(s.keep) for s in group]),
        np.concatenate([s.keep for s in group]),
        np.concatenate([s.targets for s in group]),
    )
