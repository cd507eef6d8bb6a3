"""What passes through the socket between a message's process and the resident worker.

One item is    b"UMB1" | header length u32 | frame length u64 | header, JSON, UTF-8 | frame, raw bytes

little endian; a frame length of 2^64 - 1 means that there is none. Lengths are compared with the caps before a
byte of the content is read, and memory grows with what arrives, not with what is claimed. Nothing is unpickled.
Linux only: the uid and pid of the other side come from the kernel (SO_PEERCRED).
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

MAGIC = b"UMB1"
HEADER_LIMIT_BYTES = 32 * 2**20
FRAME_LIMIT_BYTES = 16 * 2**30
CHUNK_BYTES = 1 << 20
_PREFIX = struct.Struct("<4sIQ")
_NO_FRAME = 2**64 - 1


class WireError(Exception):
    """The other side sent something that is no item of this protocol, or too much of it."""


class WireClosed(WireError):
    """The other side is gone."""


class WireTimeout(WireError):
    """Nothing arrived in the time allowed."""


def send(channel: socket.socket, header: dict[str, Any], frame: bytes | memoryview | None = None) -> None:
    """Send one item; raises WireClosed when the other side is gone, WireTimeout when it does not read."""
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    if len(text) > HEADER_LIMIT_BYTES:
        raise WireError(f"a header of {len(text)} bytes is longer than {HEADER_LIMIT_BYTES}")
    size = _NO_FRAME if frame is None else len(frame)
    try:
        channel.sendall(_PREFIX.pack(MAGIC, len(text), size) + text)
        if frame:
            channel.sendall(frame)
    except TimeoutError:
        raise WireTimeout("the other side does not read") from None
    except OSError as error:
        raise WireClosed(f"the other side is gone ({type(error).__name__})") from None


def receive(
    channel: socket.socket,
    *,
    seconds: float,
    header_limit: int = HEADER_LIMIT_BYTES,
    frame_limit: int = FRAME_LIMIT_BYTES,
) -> tuple[dict[str, Any], bytes | None]:
    """Return (header, frame or None) of the next item; raises WireError within `seconds`."""
    deadline = time.monotonic() + seconds
    magic, header_bytes, frame_bytes = _PREFIX.unpack(_exactly(channel, _PREFIX.size, deadline))
    if magic != MAGIC:
        raise WireError(f"the item starts with {magic!r}, expected {MAGIC!r}")
    if header_bytes > header_limit:
        raise WireError(f"a header of {header_bytes} bytes is longer than {header_limit}")
    if frame_bytes != _NO_FRAME and frame_bytes > frame_limit:
        raise WireError(f"a frame of {frame_bytes} bytes is longer than {frame_limit}")
    try:
        header = json.loads(_exactly(channel, header_bytes, deadline))
    except (ValueError, RecursionError):
        raise WireError("the header is not JSON") from None
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise WireError("the header is not an object with a type")
    return header, None if frame_bytes == _NO_FRAME else _exactly(channel, frame_bytes, deadline)


def _exactly(channel: socket.socket, size: int, deadline: float) -> bytes:
    got = bytearray()
    while len(got) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise WireTimeout("nothing arrived in time")
        channel.settimeout(left)
        try:
            part = channel.recv(min(CHUNK_BYTES, size - len(got)))
        except TimeoutError:
            raise WireTimeout("nothing arrived in time") from None
        except OSError as error:
            raise WireClosed(f"the other side is gone ({type(error).__name__})") from None
        if not part:
            raise WireClosed("the other side is gone")
        got += part
    return bytes(got)


def peer(channel: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
