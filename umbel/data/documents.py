"""Documents of a pretraining corpus, one string each, in a fixed order.

| source | documents |
|---|---|
| file.txt .md .py | the whole file |
| file.jsonl .json .csv .parquet | the column `text` (or `content`) of every row |
| folder | its files in order of name, of whatever kinds above |
| `stdlib:` | the sources of this Python's standard library: free text of some 10 MB on every machine |
| `demo:NAME`, `hub:ORG/NAME` | rows as `umbel.data.sources` reads them; `demo:` rows are joined field by field |

A share (i, n) is every n-th document from the i-th on. Nothing is shuffled: order is the sampler's business.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from umbel.data.readers import READERS, read_file
from umbel.data.sources import load_rows
from umbel.errors import DataError
from umbel.fsio import write_atomic

PLAIN = (".txt", ".md", ".py")
STDLIB = "stdlib:"
TEXT_COLUMNS = ("text", "content")


def documents(source: str, share: tuple[int, int] = (0, 1), limit: int = 0) -> Iterator[str]:
    """Yield the documents of one share, at most `limit` (0: all); raises DataError when there is nothing to read."""
    index, count = share
    yield from islice(islice(_all(source), index, None, count), limit or None)


def files_of(source: str) -> list[Path]:
    """Return the files a local source is read from, sorted; empty for `demo:` and `hub:`."""
    if source.startswith(STDLIB):
        root = Path(sysconfig.get_paths()["stdlib"])
        # Tests of the library and installed packages differ between installations.
        return sorted(p for p in root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py"))
    if source.startswith(("demo:", "hub:")):
        return []
    path = Path(source).expanduser()
    if path.is_dir():
        kinds = {*READERS, *PLAIN}
        found = sorted(p for p in path.iterdir() if p.suffix.lower() in kinds and not p.name.startswith("."))
    else:
        found = [path]
    if not found or not all(p.is_file() for p in found):
        raise DataError(
            f"There is no text in {source!r}. Allowed: a file or folder of {' '.join(sorted({*READERS, *PLAIN}))}."
        )
    return found


def source_digest(source: str, notes: Path) -> str:
    """Return the SHA-256 naming the content of a source; that of a file is remembered in `notes` by size and time."""
    files = files_of(source)
    parts = [[source]] if not files else [[p.suffix, _file_digest(p, notes)] for p in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _file_digest(path: Path, notes: Path) -> str:
    facts = path.stat()
    key = json.dumps([str(path.resolve()), facts.st_size, facts.st_mtime_ns])
    note = notes / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.sha256"
    with suppress(OSError):
        return note.read_text().strip()
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(1 << 22):
            digest.update(piece)
    # Small files cost less to hash than to remember.
    if facts.st_size > 1 << 24:
        with suppress(OSError):
            write_atomic(note, digest.hexdigest().encode())
    return digest.hexdigest()


def _all(source: str) -> Iterator[str]:
    files = files_of(source)
    if not files:
        for row in load_rows(source):
            yield _text(row, source)
    for path in files:
        if path.suffix.lower() in PLAIN:
            yield path.read_text("utf-8", "replace")
        else:
            for row in read_file(path):
                yield _text(row, path.name)


def _text(row: dict[str, Any], where: str) -> str:
    for column in TEXT_COLUMNS:
        if isinstance(row.get(column), str):
            return row[column]
    if where.startswith("demo:"):
        return "\n".join(str(value) for value in row.values())
    raise DataError(
        f"{where} has a row without text, got the columns {sorted(row)!r}. Allowed: a column "
        f"{' or '.join(map(repr, TEXT_COLUMNS))}. Rename the column."
    )
