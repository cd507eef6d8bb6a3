"""Several byte strings in the one frame a Flower message may hold: named parts, in order, nothing unpickled.

    magic "UMSB", version u8, count u16, then per part: name length u8, name (ASCII), size u64; then the bytes

`transport = "messages"` sends the adapter's frame and the cut's frames this way.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

MAGIC, VERSION = b"UMSB", 1
_HEAD = struct.Struct("<4sBH")
_SIZE = struct.Struct("<Q")
MAX_PARTS = 20_000

# `Reply.payload` of a reply that is not an update yet: frames for the body, over plain messages.
FRAMES = "split-frames"
# The part that holds the adapter's own frame.
ADAPTER = "adapter"
# Sources that need an answer a batch; the others send one message a round.
EXCHANGED = ("true",)


class BundleError(ValueError):
    """The bytes are no bundle."""


def is_bundle(data: bytes) -> bool:
    """Tell whether `data` begins like a bundle."""
    return data[:4] == MAGIC


def pack_bundle(parts: Mapping[str, bytes]) -> bytes:
    """Return the bytes of `parts`, in their order."""
    heads, bodies = [_HEAD.pack(MAGIC, VERSION, len(parts))], []
    for name, data in parts.items():
        text = name.encode("ascii")
        heads.append(bytes([len(text)]) + text + _SIZE.pack(len(data)))
        bodies.append(data)
    return b"".join(heads + bodies)


def unpack_bundle(data: bytes) -> dict[str, bytes]:
    """Return the parts; raises BundleError unless every byte is accounted for."""
    try:
        magic, version, count = _HEAD.unpack_from(data, 0)
        if magic != MAGIC or version != VERSION or count > MAX_PARTS:
            raise BundleError("not a bundle of this version")
        at, sizes = _HEAD.size, []
        for _ in range(count):
            length = data[at]
            name = data[at + 1 : at + 1 + length].decode("ascii")
            at += 1 + length
            (size,) = _SIZE.unpack_from(data, at)
            at += _SIZE.size
            sizes.append((name, size))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise BundleError(f"a bundle is cut short or malformed ({type(error).__name__})") from None
    if at + sum(size for _, size in sizes) != len(data) or len({n for n, _ in sizes}) != len(sizes):
        raise BundleError("the parts of a bundle do not fill it exactly")
    found, view = {}, memoryview(data)
    for name, size in sizes:
        found[name] = bytes(view[at : at + size])
        at += size
    return found
