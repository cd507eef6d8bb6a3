"""Accepted updates of the open round, kept as the frames they came in.

Frames stay in memory up to a budget and go to a file beyond it. They are decoded one at a time, in canonical
order of site names, when the round commits: memory does not grow with the number of sites.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.messages import Reply

MEMORY_BYTES = 256 * 2**20


@dataclass
class Entry:
    """One accepted update: its reply, weight, size and where its frame is."""

    reply: Reply
    weight: float
    norm: float
    num_bytes: int
    crc: str
    late: bool = False
    frame: bytes | None = None
    path: Path | None = None
    # The order it answers (`strategies.Order`): sites may send different tensors.
    order: Any = None


class Spool:
    """Frames by site; the last one of a site wins nothing: a second is refused by the engine before it gets here."""

    def __init__(self, folder: Path | None = None, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._parent, self._budget = folder, memory_bytes
        self._folder: Path | None = None
        self._held = 0
        self.entries: dict[str, Entry] = {}

    def add(self, key: str, entry: Entry, frame: bytes) -> None:
        """Keep one frame under `key` (the site's name, with a suffix for a late one)."""
        entry.num_bytes = len(frame)
        if self._held + len(frame) <= self._budget:
            entry.frame, self._held = frame, self._held + len(frame)
        else:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="spool-", dir=self._parent))
            entry.path = self._folder / f"{len(self.entries):06d}.frame"
            entry.path.write_bytes(frame)
        self.entries[key] = entry

    def ordered(self) -> list[Entry]:
        """Return the entries in canonical order."""
        return [self.entries[key] for key in sorted(self.entries)]

    def decoded(self, decode: Callable[[bytes, Entry], dict]) -> Iterator[tuple[Entry, dict]]:
        """Yield (entry, decode(frame, entry)) in canonical order, one at a time."""
        for entry in self.ordered():
            yield entry, decode(self.frame(entry), entry)

    def frame(self, entry: Entry) -> bytes:
        """Return the bytes of one entry, from memory or from the disk."""
        return entry.frame if entry.frame is not None else entry.path.read_bytes()  # type: ignore[union-attr]

    def close(self) -> None:
        """Remove everything."""
        self.entries.clear()
        self._held = 0
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
