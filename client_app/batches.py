"""From tokenised rows to the sequences one optimiser step runs over."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from umbel.data.packing import pack_rows, supervised_positions


class Sequence(NamedTuple):
    """One model call: int ids [T], positions [T], kept positions [K] and their next tokens [K]."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    keep: np.ndarray
    targets: np.ndarray


def sequences(rows: list[Any], *, max_tokens: int, packing: bool) -> list[Sequence]:
    """Return the sequences of `rows`; without packing each row is a sequence of its own.

    Sequences without a supervised position are left out: they would cost a pass and teach nothing.
    """
    groups = [rows] if packing else [[row] for row in rows]
    found = []
    for group in groups:
        for packed in pack_rows(group, max_tokens):
            keep, targets = supervised_positions(packed)
            if len(keep):
                found.append(Sequence(packed.input_ids, packed.position_ids, keep, targets))
    return found
