"""Weighted sums of several frames piece by piece, for a consumer that never wants the whole sum at once.

    for piece in sums(frames, layout, weights):
        piece.total [n] float64 = sum_k w_k decode(frame_k)[name][start : start + n]

Where `accumulate_many` needs a float64 vector as long as the model, this needs one segment: a server can merge,
step and store while the segment is in cache. The frames must have been made with one policy; they were verified when
they came in, and are decoded again here. Integers and booleans come as `rows`, one array a frame, and are not summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from compression.codecs.base import SEGMENT, segments
from compression.frame import read_header
from compression.kernels import kernels
from compression.layout import FLOAT_DTYPES, Layout
from compression.limits import DEFAULT_LIMITS, Limits
from compression.receive import _as_decoded, _Group, _is_wide, _open


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + n) of one tensor. `total` is valid until the next piece; None for no float.

    `rows` are the frames' own values where they were asked for, and always for what is no float.
    """

    name: str
    start: int
    total: np.ndarray | None
    rows: list[np.ndarray]


def sums(
    frames: Sequence[bytes | memoryview],
    layout: Layout,
    weights: Sequence[float],
    *,
    rows_of: Callable[[int], bool] = lambda segment: False,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Piece]:
    """Yield the weighted sum of `frames` piece by piece, every element of the layout exactly once.

    `rows_of` chooses, by running number from 0, the segments of lossy tensors whose single values are wanted too.
    Raises FrameError for a frame that is bad, ValueError for frames of different policies.
    """
    headers = [read_header(frame, limits) for frame in frames]
    if len({header.policy for header in headers}) != 1:
        raise ValueError("the frames were made with different policies")
    opened = [_open(f, h, layout, None, None) for f, h in zip(frames, headers, strict=True)]
    turn = count()
    for groups in zip(*opened, strict=True):
        first = groups[0]
        parts = _bytes(groups, weights) if first.is_bytes else _vector(groups, weights, rows_of, turn)
        for pieces in parts:
            yield from pieces


def _bytes(groups: Sequence[_Group], weights: Sequence[float]) -> Iterator[list[Piece]]:
    """Tensors that travel as they are: views on the frames where the codec allows."""
    parts = [group.parts() for group in groups]
    for index, entry in enumerate(groups[0].entries):
        rows = [own[index] for own in parts]
        if entry.dtype not in FLOAT_DTYPES:
            yield [Piece(entry.name, 0, None, rows)]
            continue
        for start, stop in segments(entry.numel, SEGMENT):
            total = np.zeros(stop - start)
            for row, weight in zip(rows, weights, strict=True):
                total += row[start:stop].astype(np.float64) * weight
            yield [Piece(entry.name, start, total, [])]


def _vector(
    groups: Sequence[_Group], weights: Sequence[float], rows_of: Callable[[int], bool], turn: Iterator[int]
) -> Iterator[list[Piece]]:
    first = groups[0]
    size = min(first.decoder.segment, max(first.places.numel, 1))
    total, scratch = np.empty(size), np.empty(size, np.float32)
    add = kernels(first.places.numel).axpy
    for start, stop in segments(first.places.numel, first.decoder.segment):
        room = total[: stop - start]
        room[:] = 0.0
        pieces = list(first.places.pieces(start, stop))
        wide = all(_is_wide(first.entries[index]) for index, _, _ in pieces)
        wanted = rows_of(next(turn))
        kept: list[np.ndarray] = []
        for group, weight in zip(groups, weights, strict=True):
            if wide and not wanted and group.decoder.accumulate(start, room, float(weight)):
                continue
            values = np.empty(stop - start, np.float32) if wanted else scratch[: stop - start]
            group.segment(start, values)
            for index, low, high in pieces:
                part = slice(low - start, high - start)
                values[part] = _as_decoded(values[part], first.entries[index])
            add(values, room, float(weight))
            kept += [values] if wanted else []
        found = []
        for index, low, high in pieces:
            part = slice(low - start, high - start)
            rows = [row[part] for row in kept]
            found.append(Piece(first.entries[index].name, low - first.places.starts[index], room[part], rows))
        yield found
