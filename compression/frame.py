"""The wire frame, version 1: one update, one block of bytes, validated as a whole before it is trusted.

    "FCF1" | u8 version | u8 flags | u16 0 | u32 header_len | header | sections | u64 xxh3    (little-endian)

The header is canonical JSON (sorted keys, ASCII, no floats, at most 64 KiB) and holds nothing per tensor;
the xxh3 covers every byte before it. It guards against accidents, not attackers: authenticity belongs to
the transport. Every size here is checked against the frame's real length; no allocation follows a number a
frame states.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from compression.errors import FrameError
from compression.limits import DEFAULT_LIMITS, Limits

MAGIC = b"FCF1"
VERSION = 1
_PREFIX = struct.Struct("<4sBBHI")
_CHECK = struct.Struct("<Q")
_MAX_INT = 1 << 63
_HEADER_KEYS = {"base", "groups", "layout", "numel", "policy", "round", "seed"}
_GROUP_KEYS = {"nnz", "sections", "spec"}


@dataclass(frozen=True)
class GroupHeader:
    """One group: the resolved spec, the number of values that travel, and its sections as (kind, bytes)."""

    spec: str
    nnz: int
    sections: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class FrameHeader:
    """Everything a frame says about itself. `body_offset` is where the first section starts, in bytes."""

    layout_digest: str
    numel: int
    policy: str
    seed: int
    round_index: int
    base: str
    groups: tuple[GroupHeader, ...]
    body_offset: int = 0

    @property
    def specs(self) -> tuple[str, ...]:
        return tuple(group.spec for group in self.groups)

    def to_bytes(self) -> bytes:
        """Canonical JSON of the header."""
        groups = [
            {"nnz": g.nnz, "sections": [list(s) for s in g.sections], "spec": g.spec} for g in self.groups
        ]
        document = {
            "base": self.base,
            "groups": groups,
            "layout": self.layout_digest,
            "numel": self.numel,
            "policy": self.policy,
            "round": self.round_index,
            "seed": self.seed,
        }
        return _canonical(document)


def _canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


class FrameWriter:
    """A growing, reusable byte buffer in which codecs write their sections; the header goes in front at the
    end.

    Reuse one writer for many frames: fresh pages cost more than the arithmetic that fills them.
    """

    _HEAD = DEFAULT_LIMITS.max_header_bytes + _PREFIX.size

    def __init__(self, capacity_bytes: int = 0) -> None:
        self._buffer = np.empty(self._HEAD + capacity_bytes + _CHECK.size, np.uint8)
        self.reset()

    def reset(self) -> None:
        """Forget the content, keep the memory."""
        self._end = self._start = self._HEAD
        self._sections: list[tuple[str, int]] = []

    def reserve(self, num_bytes: int) -> np.ndarray:
        """A uint8 view of the next `num_bytes` bytes, undefined content; valid until the next `reserve`."""
        needed = self._end + num_bytes + _CHECK.size
        if needed > self._buffer.size:
            grown = np.empty(max(needed, self._buffer.size * 3 // 2), np.uint8)
            grown[: self._end] = self._buffer[: self._end]
            self._buffer = grown
        return self._buffer[self._end : self._end + num_bytes]

    def advance(self, num_bytes: int) -> None:
        """Keep the first `num_bytes` bytes of what was reserved."""
        self._end += num_bytes

    def end_section(self, kind: str) -> None:
        """Close the section that holds all bytes kept since the last one."""
        self._sections.append((kind, self._end - self._start))
        self._start = self._end

    def patch(self, offset: int, data: np.ndarray) -> None:
        """Overwrite bytes of the open section, `offset` bytes after its start."""
        self._buffer[self._start + offset : self._start + offset + data.size] = data

    def split_section(self, *parts: tuple[str, int]) -> None:
        """Close sections of the given sizes at the front of the bytes kept since the last one."""
        for kind, size in parts:
            self._sections.append((kind, size))
            self._start += size

    def section(self, kind: str, data: np.ndarray | bytes) -> None:
        """Write a whole section at once."""
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
        self.reserve(raw.size)[:] = raw
        self.advance(raw.size)
        self.end_section(kind)

    def take_sections(self) -> tuple[tuple[str, int], ...]:
        """Sections closed since the last call: those of one group."""
        taken, self._sections = tuple(self._sections), []
        return taken

    def finish(self, header: FrameHeader) -> memoryview:
        """Put the header in front, the checksum behind; the view is valid until the writer is used again."""
        text = header.to_bytes()
        if len(text) > DEFAULT_LIMITS.max_header_bytes:
            raise ValueError(
                f"frame header is too long, got {len(text)} bytes. Use a policy with fewer rules."
            )
        prefix = _PREFIX.pack(MAGIC, VERSION, 0, 0, len(text)) + text
        start = self._HEAD - len(prefix)
        self._buffer[start : self._HEAD] = np.frombuffer(prefix, np.uint8)
        digest = xxhash.xxh3_64_intdigest(self._buffer[start : self._end].data)
        tail = self._buffer[self._end : self._end + _CHECK.size]
        tail[:] = np.frombuffer(_CHECK.pack(digest), np.uint8)
        return self._buffer[start : self._end + _CHECK.size].data


def read_header(frame: bytes | memoryview, limits: Limits = DEFAULT_LIMITS) -> FrameHeader:
    """Validate prefix, checksum, header and tiling; return the header. Raises FrameError, never anything
    else."""
    view = _as_bytes_view(frame)
    size = view.nbytes
    if size > limits.max_frame_bytes:
        raise FrameError("too_large", f"{size} bytes, at most {limits.max_frame_bytes}")
    if size < _PREFIX.size + _CHECK.size:
        raise FrameError("truncated", f"{size} bytes")
    magic, version, flags, zero, header_len = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise FrameError("magic")
    if version != VERSION:
        raise FrameError("version", f"{version}, this receiver reads {VERSION}")
    if flags or zero:
        raise FrameError("flags")
    body_offset = _PREFIX.size + header_len
    if header_len > limits.max_header_bytes or body_offset + _CHECK.size > size:
        raise FrameError("header_length", f"{header_len}")
    (expected,) = _CHECK.unpack_from(view, size - _CHECK.size)
    if xxhash.xxh3_64_intdigest(view[: size - _CHECK.size]) != expected:
        raise FrameError("checksum")
    header = _header_from_json(bytes(view[_PREFIX.size : body_offset]), body_offset)
    if header.numel > limits.max_numel:
        raise FrameError("too_large", f"{header.numel} elements, at most {limits.max_numel}")
    if body_offset + sum(n for g in header.groups for _, n in g.sections) + _CHECK.size != size:
        raise FrameError("tiling", "sections do not fill the body exactly")
    return header


def section_views(frame: bytes | memoryview, header: FrameHeader) -> list[dict[str, np.ndarray]]:
    """The sections of every group as read-only uint8 views, in order. Call after `read_header`."""
    raw = np.frombuffer(_as_bytes_view(frame), np.uint8)
    position = header.body_offset
    groups = []
    for group in header.groups:
        views: dict[str, np.ndarray] = {}
        for kind, length in group.sections:
            if kind in views:
                raise FrameError("section_twice", kind)
            views[kind] = raw[position : position + length]
            position += length
        groups.append(views)
    return groups


def _as_bytes_view(frame: bytes | memoryview) -> memoryview:
    try:
        return memoryview(frame).cast("B")
    except TypeError as error:
        raise FrameError("not_bytes", str(error)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _no_float(text: str) -> Any:
    raise ValueError(f"float {text[:40]} in a header")


def _header_from_json(text: bytes, body_offset: int) -> FrameHeader:
    try:
        document = json.loads(
            text.decode("ascii"), object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float
        )
        header = _header_from_document(document, body_offset)
        canonical = header.to_bytes()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FrameError("header", f"{type(error).__name__}: {str(error)[:120]}") from error
    if canonical != text:
        raise FrameError("header", "not canonical")
    return header


def _header_from_document(document: Any, body_offset: int) -> FrameHeader:
    _expect_keys(document, _HEADER_KEYS)
    groups = []
    for group in _typed(document["groups"], list):
        _expect_keys(group, _GROUP_KEYS)
        sections = []
        for row in _typed(group["sections"], list):
            kind, length = _typed(row, list)
            sections.append((_typed(kind, str), _natural(length)))
        groups.append(GroupHeader(_typed(group["spec"], str), _natural(group["nnz"]), tuple(sections)))
    return FrameHeader(
        layout_digest=_typed(document["layout"], str),
        numel=_natural(document["numel"]),
        policy=_typed(document["policy"], str),
        seed=_natural(document["seed"]),
        round_index=_natural(document["round"]),
        base=_typed(document["base"], str),
        groups=tuple(groups),
        body_offset=body_offset,
    )


def _expect_keys(value: Any, keys: set[str]) -> None:
    if set(_typed(value, dict)) != keys:
        raise ValueError("unknown or missing key")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_INT:
        raise ValueError("a number below 2^63 expected")
    return value
