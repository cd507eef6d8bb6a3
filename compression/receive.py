"""The receiving side: decode and accumulate, sized by the receiver's layout and refusing what does not fit
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compression.codecs.base import SEGMENT, segments
from compression.errors import FrameError
from compression.finite import all_finite, first_non_finite
from compression.frame import FrameHeader, GroupHeader, read_header, section_views
from compression.kernels import kernels
from compression.layout import DTYPES, Layout, TensorSpec
from compression.limits import DEFAULT_LIMITS, Limits
from compression.policy import parse_policy
from compression.registry import build
from compression.rng import stream_key
from compression.source import Places, Target, contiguous_parts
from compression.spec import parse
from umbel.errors import ConfigError

Arrays = Mapping[str, np.ndarray]


def decode(
    frame: bytes | memoryview,
    layout: Layout,
    *,
    limits: Limits = DEFAULT_LIMITS,
    base: str | None = None,
    base_arrays: Arrays | None = None,
    out: Arrays | None = None,
) -> dict[str, np.ndarray]:
    """Decode a frame into arrays of the layout's shapes and dtypes, in layout order.

    They are fresh, or those of `out` (contiguous, same layout; half-written if the frame turns out bad):
    reuse spares the cost of fresh pages.

    With `base` given, a frame made against another base is refused. Raises FrameError only.
    """
    header = read_header(frame, limits)
    opened = _open(frame, header, layout, base, base_arrays)
    room = dict(zip([e.name for e in layout.entries], _destinations(layout, out)))
    found: dict[str, np.ndarray] = {}
    for group in opened:
        found.update(group.decode([room[e.name] for e in group.entries] if out is not None else None))
    return {entry.name: found[entry.name] for entry in layout.entries}


def accumulate(
    frame: bytes | memoryview,
    layout: Layout,
    out: np.ndarray,
    weight: float,
    *,
    limits: Limits = DEFAULT_LIMITS,
    verified: bool = False,
    base: str | None = None,
    base_arrays: Arrays | None = None,
) -> None:
    """out += weight * decode(frame), in float64, segment by segment.

    `out` has shape (layout.numel,) and dtype float64. A bad frame raises FrameError and leaves `out` as it
    was: the frame is first decoded once without effect, unless the caller has done so and says
    `verified=True`.
    """
    accumulate_many(
        [frame], layout, out, [weight], limits=limits, verified=verified, base=base, base_arrays=base_arrays
    )


def accumulate_many(
    frames: Sequence[bytes | memoryview],
    layout: Layout,
    out: np.ndarray,
    weights: Sequence[float],
    *,
    limits: Limits = DEFAULT_LIMITS,
    verified: bool = False,
    base: str | None = None,
    base_arrays: Arrays | None = None,
) -> None:
    """out += sum of weight * decode(frame), frame after frame per segment, so that `out` stays in cache.

    Equal to calling `accumulate` in the order given, bit for bit. Memory does not grow with the number of
    frames.
    """
    if out.shape != (layout.numel,) or out.dtype != np.float64 or not out.flags.c_contiguous:
        raise ValueError(
            f"out must be a contiguous float64 array of shape ({layout.numel},), got {out.dtype} {out.shape}"
        )
    opened = []
    for frame in frames:
        groups = _open(frame, read_header(frame, limits), layout, base, base_arrays)
        if not verified:
            for group in groups:
                group.verify()
        opened.append(groups)
    if opened and all(_same_grouping(groups, opened[0]) for groups in opened):
        for same in zip(*opened):
            _add_together(same, layout, out, weights)
        return
    for groups, weight in zip(opened, weights):
        for group in groups:
            _add_together([group], layout, out, [weight])


class _Group:
    """One group of a received frame, checked and ready to decode."""

    def __init__(
        self, codec: Any, views: dict, entries: list[TensorSpec], header: GroupHeader, seed: int
    ) -> None:
        self.entries = entries
        self.places = Places(entries, getattr(codec, "align", 1))
        self.codec, self.views, self.nnz = codec, views, header.nnz
        self.bases: list[np.ndarray] | None = None
        self.is_bytes = hasattr(codec, "decode_bytes")
        self.decoder: Any = None if self.is_bytes else codec.open(views, entries, header.nnz, seed)
        self._parts: list[np.ndarray] | None = None

    def parts(self, out_parts: list[np.ndarray] | None = None) -> list[np.ndarray]:
        """Byte codecs: the decoded tensors as flat arrays, finite."""
        if self._parts is None:
            parts = self.codec.decode_bytes(self.views, self.entries, self.nnz, self.bases, out_parts)
            for entry, part in zip(self.entries, parts):
                if not all_finite(part):
                    raise FrameError("non_finite", entry.name)
            self._parts = parts
        return self._parts

    def decode(self, out_parts: list[np.ndarray] | None) -> dict[str, np.ndarray]:
        if self.is_bytes:
            own = self.parts(out_parts)
            if not self.codec.fresh:
                own = _copied(own, out_parts)
        else:
            own = out_parts or [np.empty(e.numel, DTYPES[e.dtype]) for e in self.entries]
            target = Target(self.entries, own, self.places.align)
            for start, stop in segments(target.numel, self.decoder.segment):
                direct = target.view(start, stop)
                piece = np.empty(stop - start, np.float32) if direct is None else direct
                self.segment(start, piece)
                if direct is None:
                    target.put(start, piece)
        return {e.name: part.reshape(e.shape) for e, part in zip(self.entries, own)}

    def segment(self, start: int, out: np.ndarray) -> None:
        self.decoder.decode(start, out)
        if not kernels(self.places.numel).all_finite(out):
            raise FrameError("non_finite", "a decoded value")

    def verify(self) -> None:
        if self.is_bytes:
            self.parts()
            return
        scratch = np.empty(min(self.decoder.segment, max(self.places.numel, 1)), np.float32)
        for start, stop in segments(self.places.numel, self.decoder.segment):
            self.segment(start, scratch[: stop - start])
            for index, low, high in self.places.pieces(start, stop):
                _as_decoded(scratch[low - start : high - start], self.entries[index])


def _open(
    frame: bytes | memoryview,
    header: FrameHeader,
    layout: Layout,
    base: str | None,
    base_arrays: Arrays | None,
) -> list[_Group]:
    if header.layout_digest != layout.digest() or header.numel != layout.numel:
        raise FrameError("layout", "made for other tensors than this receiver expects")
    if base is not None and header.base != base:
        raise FrameError("base", f"made against {header.base[:80]!r}, this receiver holds {base[:80]!r}")
    try:
        policy = parse_policy(header.policy)
        expected = policy.groups(layout)
        pipelines = [parse(group.spec) for group in header.groups]
        codecs = [build(pipeline) for pipeline in pipelines]
    except ConfigError as error:
        raise FrameError("spec", str(error)[:200]) from error
    if policy.wire() != header.policy or [p.wire() for p in pipelines] != list(header.specs):
        raise FrameError("spec", "not canonical")
    if len(expected) != len(header.groups):
        raise FrameError("groups", f"{len(header.groups)}, expected {len(expected)}")
    groups = []
    for number, (views, (wanted, indices)) in enumerate(zip(section_views(frame, header), expected)):
        if pipelines[number].names[0] != wanted.names[0]:
            raise FrameError("spec", f"{pipelines[number]} where the policy says {wanted}")
        entries = [layout.entries[i] for i in indices]
        group = _Group(codecs[number], views, entries, header.groups[number], stream_key(header.seed, number))
        if base_arrays is not None and group.is_bytes:
            group.bases = contiguous_parts(entries, [layout.ordered(base_arrays)[i] for i in indices])
        groups.append(group)
    return groups


def _destinations(layout: Layout, out: Arrays | None) -> list[np.ndarray]:
    if out is None:
        return []
    arrays = layout.ordered(out)
    if not all(array.flags.c_contiguous and array.flags.writeable for array in arrays):
        raise ValueError("out must hold writable C-contiguous arrays")
    return [array.reshape(-1) for array in arrays]


def _copied(parts: list[np.ndarray], out_parts: list[np.ndarray] | None) -> list[np.ndarray]:
    if out_parts is None:
        return [np.array(part) for part in parts]
    for out, part in zip(out_parts, parts):
        out[:] = part
    return out_parts


def _same_grouping(left: list[_Group], right: list[_Group]) -> bool:
    def shape(groups: list[_Group]) -> list:
        return [(g.entries, g.places.align, g.decoder.segment if g.decoder else 0) for g in groups]

    return shape(left) == shape(right)


def _add_together(
    groups: Sequence[_Group], layout: Layout, out: np.ndarray, weights: Sequence[float]
) -> None:
    first = groups[0]
    offsets = dict(zip((e.name for e in layout.entries), layout.offsets))
    if first.is_bytes:
        for group, weight in zip(groups, weights):
            _add_parts(group, offsets, out, weight)
        return
    shifts = [offsets[e.name] - start for e, start in zip(first.entries, first.places.starts)]
    scratch = np.empty(min(first.decoder.segment, max(first.places.numel, 1)), np.float32)
    for start, stop in segments(first.places.numel, first.decoder.segment):
        pieces = list(first.places.pieces(start, stop))
        whole = pieces[0][1:] == (start, stop) and _is_wide(first.entries[pieces[0][0]])
        for group, weight in zip(groups, weights):
            if whole:
                place = start + shifts[pieces[0][0]]
                if group.decoder.accumulate(start, out[place : place + stop - start], float(weight)):
                    continue
            values = scratch[: stop - start]
            group.segment(start, values)
            for index, low, high in pieces:
                room = out[low + shifts[index] : high + shifts[index]]
                part = _as_decoded(values[low - start : high - start], first.entries[index])
                kernels(first.places.numel).axpy(part, room, float(weight))


def _is_wide(entry: TensorSpec) -> bool:
    return entry.dtype in ("float32", "float64")


def _as_decoded(values: np.ndarray, entry: TensorSpec) -> np.ndarray:
    """What `decode` would have returned: values rounded to a narrower dtype, so that sums and residuals
    agree."""
    if _is_wide(entry):
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(DTYPES[entry.dtype])
    if first_non_finite(narrow) >= 0:
        raise FrameError("non_finite", entry.name)
    return narrow.astype(np.float32)


def _add_parts(group: _Group, offsets: dict[str, int], out: np.ndarray, weight: float) -> None:
    for entry, part in zip(group.entries, group.parts()):
        place = offsets[entry.name]
        for start, stop in segments(part.size, SEGMENT):
            out[place + start : place + stop] += part[start:stop].astype(np.float64) * weight
