"""The event log of a run: one JSON object a line, append-only, the source of every number shown.

    {"t": 1764556801.25, "event": "update_accepted", "round": 3, "site": "clinic", "loss": 2.31, ...}

`t` is unix seconds, `event` the name. A line is handed to the operating system in one write, so that a killed
process leaves at most one torn line, and a resumed run starts on a fresh line. Readers skip what they cannot
parse and say how many lines that was. The log is not a database: it is read whole or from a byte offset.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from umbel.telemetry.jsonable import jsonable


class EventLog:
    """Appends events to `path`; the file is opened (and its folder made) at the first write.

    `clock` returns unix seconds. Safe to share between threads. Raises OSError when the disk refuses.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._fd: int | None = None
        self._torn = False
        self._lock = threading.Lock()

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def write(self, event: str, /, *, fsync: bool = False, **fields: Any) -> dict[str, Any]:
        """Append one event and return it as a reader will see it (for `History.add`).

        `fsync=True` returns only when it is on the disk (round records).
        """
        record = {"t": round(self._clock(), 3), "event": str(event)} | {
            k: jsonable(v) for k, v in fields.items() if k not in ("t", "event")
        }
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._lock:
            fd = self._open()
            self._append(fd, b"\n" + line if self._torn else line)
            if fsync:
                os.fsync(fd)
        return record

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _open(self) -> int:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = _ends_mid_line(self.path)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        return self._fd

    def _append(self, fd: int, line: bytes) -> None:
        # Set before and cleared after: a write that stops half way (full disk) must not glue two lines.
        self._torn = True
        view = memoryview(line)
        while view:
            view = view[os.write(fd, view) :]
        self._torn = False


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all readable events of the file in order; an absent file is an empty run."""
    return scan_events(path)[0]


def scan_events(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the readable events and the number of lines that were not (torn by a crash, or damaged)."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return [], 0
    return _parse(data)


def tail(path: str | os.PathLike[str], offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the events of the complete lines after byte `offset`, and the offset to ask from next.

    A file shorter than `offset` has been replaced and is read from its start.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = offset if offset <= size else 0
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    complete = data[: data.rfind(b"\n") + 1]
    return _parse(complete)[0], start + len(complete)


def _parse(data: bytes) -> tuple[list[dict[str, Any]], int]:
    events: list[dict[str, Any]] = []
    unreadable = 0
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("event"), str):
            events.append(record)
        else:
            unreadable += 1
    return events, unreadable


def _ends_mid_line(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
