"""A directory that appears whole or not at all.

Files are written under a temporary name beside the target, flushed to the disk and renamed. A crash leaves
the old directory or a `.tmp-` one that nobody reads. It does not lock: two writers of one target take turns
outside (see `gguf.py`), or the last one wins.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from umbel.fsio import fsync_folder


@contextmanager
def atomic_directory(target: str | Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `target` when the block ends without an exception.

    An existing `target` is replaced as a whole; files of an earlier export never mix with the new ones.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:12]
    temporary = target.parent / f".tmp-{target.name}-{token}"
    temporary.mkdir()
    try:
        yield temporary
        _flush(temporary)
        _replace(temporary, target, target.parent / f".old-{target.name}-{token}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(new: Path, target: Path, aside: Path) -> None:
    if target.exists():
        target.rename(aside)
    try:
        new.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    fsync_folder(target.parent)


def _flush(directory: Path) -> None:
    # Some writers create private files; an export is as readable as the directory it lies in.
    mode = directory.stat().st_mode & 0o666
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            path.chmod(mode)
        fsync_folder(path)
    fsync_folder(directory)
