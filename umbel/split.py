"""What crosses the cut of a split model: numbered frames of opaque bytes, their limits, and who counts them.

    frame = magic "UMSP", version u8, kind u8, flags u16, chunk u32, step u32, length u64 (little endian), payload

    site -> server   HELLO   FWD  activation [labels]     GRAD  gradient at the tail's input    SAVE  site's half    DONE
    server -> site   READY   OUT  body's output (U)       BWD   gradient at the cut             SAVE           DONE, ABORT

Chunks count from 1, steps of a chunk from 0. Nothing is unpickled; a receiver takes no size from a frame but compares
the frame's length with what it was told beforehand. `SplitTransport` is all a site's half needs to know of a link;
`LocalTransport` is the one without a link. Codecs, models and Flower are elsewhere.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from umbel.errors import UmbelError

MAGIC, VERSION = b"UMSP", 1
HEADER = struct.Struct("<4sBBHIIQ")
# Before the adapter's frame in SAVE: label tokens and sum of losses so far.
SAVE_HEAD = struct.Struct("<Qd")

# Cut traffic and weight traffic are never one number; labels always count.
CATEGORIES = (
    "act_up",
    "out_down",
    "grad_up",
    "grad_down",
    "label_up",
    "mask_up",
    "adapter_up",
    "adapter_down",
    "aux_up",
    "aux_down",
    "control",
)


class SplitError(UmbelError):
    """A frame or a session breaks the rules, or the other side ended it; the text says why, without data."""


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1
    READY = 2
    FWD = 3
    OUT = 4
    GRAD = 5
    BWD = 6
    DONE = 7
    ABORT = 8
    SAVE = 9


@dataclass(frozen=True)
class Frame:
    """One frame; `payload` is opaque to transports."""

    kind: FrameKind
    chunk: int
    step: int
    payload: bytes = b""
    flags: int = 0

    @property
    def packed_bytes(self) -> int:
        """Bytes on the link, header included."""
        return HEADER.size + len(self.payload)

    def text(self) -> str:
        """Return the payload of an ABORT as a line of text."""
        return " ".join(self.payload[:400].decode("utf-8", "replace").split())


def pack_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    head = HEADER.pack(
        MAGIC, VERSION, int(frame.kind), frame.flags, frame.chunk, frame.step, len(frame.payload)
    )
    return head + frame.payload


def unpack_frame(data: bytes, *, max_bytes: int) -> Frame:
    """Return the frame; raises SplitError when it is none, or its payload is longer than `max_bytes`."""
    if len(data) < HEADER.size:
        raise SplitError(f"a frame has {len(data)} bytes, fewer than its header")
    magic, version, kind, flags, chunk, step, length = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise SplitError("not a frame of this version")
    if length != len(data) - HEADER.size:
        raise SplitError(f"a frame announces {length} bytes and holds {len(data) - HEADER.size}")
    if length > max_bytes:
        raise SplitError(f"a frame of {length} bytes is larger than the {max_bytes} agreed on")
    if kind not in FrameKind._value2member_map_:
        raise SplitError(f"a frame of unknown kind {kind}")
    return Frame(FrameKind(kind), chunk, step, bytes(data[HEADER.size :]), flags)


class SplitTransport(Protocol):
    """A site's link to the body for one round; answers come in the order of the frames."""

    def send(self, frame: Frame) -> None:
        """Send one frame ahead; may wait for room."""

    def receive(self) -> Frame:
        """Return the answer to the oldest frame without one; raises SplitError when there will be none."""

    def exchange(self, frame: Frame) -> Frame:
        """Send one frame and return its answer."""


class LocalTransport:
    """The body in the same process: for tests, and as the measure of what a link costs.

    Frames are packed and unpacked as on a link. `seen` gets every frame's bytes, both ways.
    """

    def __init__(
        self, work: Callable[[Frame], Frame], *, seen: Callable[[bytes], None] = lambda data: None
    ) -> None:
        self._work, self._seen = work, seen
        self._answers: deque[Frame] = deque()

    def greet(self, hello: Frame) -> Frame:
        """Return READY."""
        return self.exchange(hello)

    def send(self, frame: Frame) -> None:
        """Let the body work at once and keep its answer."""
        self._answers.append(self._over(self._work(self._over(frame))))

    def receive(self) -> Frame:
        """Return the oldest answer."""
        if not self._answers:
            raise SplitError("an answer was asked for and nothing was sent")
        return self._answers.popleft()

    def exchange(self, frame: Frame) -> Frame:
        """Send one frame and return its answer."""
        self.send(frame)
        return self.receive()

    def _over(self, frame: Frame) -> Frame:
        data = pack_frame(frame)
        self._seen(data)
        return unpack_frame(data, max_bytes=len(data))


class Ledger:
    """Bytes by category."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = dict.fromkeys(CATEGORIES, 0)

    def add(self, counts: Mapping[str, int]) -> None:
        """Add bytes; raises KeyError for a category that does not exist."""
        for name, count in counts.items():
            self.bytes[name] += count

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())
