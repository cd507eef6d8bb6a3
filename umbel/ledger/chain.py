"""A file of JSON lines in which every line names the one before: nothing can be changed, removed or put in between.

    line_n = {..., "prev": hash_{n-1}, "hash": sha256(canonical JSON of the line without "hash")}      hash_0 = ""

Appending holds a file lock and hands one write to the operating system; a torn last line (a killed process) is set
aside as a comment by the next writer. It does not stop somebody from cutting lines off the end, nor from writing
the whole file anew: against that a copy elsewhere, or signatures inside the lines (`umbel.ledger.manifest`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_TAIL_BYTES = 1 << 20


def canonical(value: Any) -> bytes:
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII; NaN is refused with ValueError."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def hash_of(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without its own "hash", in hex."""
    return hashlib.sha256(canonical({k: v for k, v in record.items() if k != "hash"})).hexdigest()


def append(path: Path, record: Mapping[str, Any], *, fsync: bool = False) -> dict[str, Any]:
    """Append one record to the chain in `path` (created, 0600) and return it with "prev" and "hash"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        head, torn = _last(handle)
        linked = {**record, "prev": head}
        linked["hash"] = hash_of(linked)
        # The torn line stays for whoever looks: closed, it is a line that cannot be parsed and has no successor.
        os.write(handle, (b"#\n" if torn else b"") + canonical(linked) + b"\n")
        if fsync:
            os.fsync(handle)
    finally:
        os.close(handle)
    return linked


def _last(handle: int) -> tuple[str, bool]:
    """Return the hash of the newest whole line and whether an unfinished one follows it."""
    size, window = os.fstat(handle).st_size, _TAIL_BYTES
    torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
    while True:
        start = max(0, size - window)
        lines = os.pread(handle, size - start, start).splitlines()
        # The first line of a window may be the end of a longer one.
        for line in reversed(lines[1 if start else 0 : -1 if torn else None]):
            record = _parsed(line)
            if record is not None:
                return str(record.get("hash", "")), torn
        if start == 0:
            return "", torn
        window *= 8


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number from 1, record) of a chain; None for a line that is no record and no torn one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip() and not line.endswith(b"#"):
            yield number, _parsed(line)


def records(path: Path) -> list[dict[str, Any]]:
    """Return the readable records of a chain, unchecked."""
    return [record for _, record in read(path) if record is not None]


def first_break(path: Path) -> str:
    """Return what is wrong with the first line that does not follow from the one before; '' for a whole chain."""
    head = ""
    for number, record in read(path):
        where = f"{path.name} line {number}"
        if record is None:
            return f"{where} cannot be read"
        if record.get("prev") != head:
            follows = str(record.get("prev"))[:12] or "(nothing)"
            return f"{where} follows {follows}, the line before is {head[:12] or '(none)'}"
        if hash_of(record) != record.get("hash"):
            return f"{where} was changed: its content is not what its hash names"
        head = str(record["hash"])
    return ""
