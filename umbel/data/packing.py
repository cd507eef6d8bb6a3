"""Turn encoded rows into what a model is called with: packed rows, or a padded batch.

Packing: first-fit-decreasing (Johnson 1973, at most 11/9 of the optimal number of bins plus a constant) over
the rows of one optimizer step. Position ids restart at every segment; with `attention_mask=None` and
`use_cache=False` transformers builds the block-diagonal mask from them, so segments do not see each other.

Labels are never shifted here. `supervised_positions` does the one shift there is, for a model called with
`logits_to_keep`:   targets[i] = labels[keep[i] + 1],  both in the same segment.

Padding is on the right and masked by length, never by token id: pad may equal EOS. Nothing here truncates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from umbel.data.encode import IGNORE, Encoded
from umbel.errors import ConfigError


@dataclass(frozen=True)
class PackedRow:
    """Several segments in one row of T tokens; `labels` int32 [T], -100 = no target, not shifted."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    num_supervised: int


@dataclass(frozen=True)
class PaddedBatch:
    """int64 [B, T] arrays, right padded; `attention_mask` is 1 on real tokens; labels not shifted."""

    input_ids: np.ndarray
    labels: np.ndarray
    attention_mask: np.ndarray
    num_supervised: int


def pack_rows(encoded: Sequence[Encoded], max_tokens: int) -> list[PackedRow]:
    """Pack the rows into as few rows of at most `max_tokens` tokens as first-fit-decreasing finds.

    Deterministic: longest first, ties by the given order. The number of supervised tokens is kept exactly,
    where a row's very first token never counts: nothing precedes it. Raises ConfigError when a row is longer
    than `max_tokens`.
    """
    longest = max((len(row.input_ids) for row in encoded), default=0)
    if longest > max_tokens:
        raise ConfigError(
            "max_tokens",
            "is smaller than a row to pack",
            got=max_tokens,
            allowed=f">= {longest}",
            remedy="Raise it, or lower the maximum row length.",
        )
    bins: list[list[Encoded]] = []
    room: list[int] = []
    for row in sorted(encoded, key=lambda row: -len(row.input_ids)):
        size = len(row.input_ids)
        place = next((i for i, free in enumerate(room) if free >= size), None)
        if place is None:
            bins.append([row])
            room.append(max_tokens - size)
        else:
            bins[place].append(row)
            room[place] -= size
    return [_join(segments) for segments in bins]


def _join(segments: Sequence[Encoded]) -> PackedRow:
    labels = np.concatenate([row.labels for row in segments]).astype(np.int32)
    positions = np.concatenate([np.arange(len(row.input_ids), dtype=np.int32) for row in segments])
    # The token before a segment's first one belongs to somebody else's text.
    labels[positions == 0] = IGNORE
    return PackedRow(
        input_ids=np.concatenate([row.input_ids for row in segments]).astype(np.int32),
        labels=labels,
        position_ids=positions,
        num_supervised=int((labels != IGNORE).sum()),
    )


def supervised_positions(row: PackedRow | Encoded) -> tuple[np.ndarray, np.ndarray]:
    """Return (keep_positions, targets), both int64 [S]: the logits at keep[i] predict targets[i]."""
    following = np.asarray(row.labels)[1:]
    keep = np.flatnonzero(following != IGNORE)
    if isinstance(row, PackedRow):
        keep = keep[row.position_ids[keep + 1] != 0]
    return keep.astype(np.int64), following[keep].astype(np.int64)


def pad_rows(encoded: Sequence[Encoded], pad_id: int = 0, *, multiple_of: int = 1) -> PaddedBatch:
    """Pad on the right to the longest row (rounded up to `multiple_of`); the mask follows the lengths."""
    longest = max((len(row.input_ids) for row in encoded), default=0)
    width = -(-longest // multiple_of) * multiple_of
    input_ids = np.full((len(encoded), width), pad_id, dtype=np.int64)
    labels = np.full((len(encoded), width), IGNORE, dtype=np.int64)
    mask = np.zeros((len(encoded), width), dtype=np.int64)
    for i, row in enumerate(encoded):
        size = len(row.input_ids)
        input_ids[i, :size], labels[i, :size], mask[i, :size] = row.input_ids, row.labels, 1
    return PaddedBatch(input_ids, labels, mask, int((labels[:, 1:] != IGNORE).sum()))
