"""Files that are either whole or absent, whatever is killed when."""

from __future__ import annotations

import os
import re
from pathlib import Path


def safe_name(text: str) -> str:
    """Return `text` as a file or folder name that cannot leave its parent."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".")
    return cleaned[:100] or "_"


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durable(path: Path, data: bytes) -> None:
    """Write and fsync one file in place; the caller renames its folder when all are written."""
    with open(path, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: temporary name, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durable(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
