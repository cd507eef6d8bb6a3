"""Rows out of files, folders, the built-in demonstration or a data hub.

| source                                  | rows                                                             |
|-----------------------------------------|------------------------------------------------------------------|
| file.jsonl .json .csv .tsv .parquet     | one object, line or record a row                               |
| file.txt                                | {"text": ...} chunks of whole paragraphs, up to 2,000 characters |
| folder                                  | its files in sorted order; a .txt there is one document, one row |
| demo:NAME                               | the built-in site NAME                                         |
| hub:ORG/NAME or hub:ORG/NAME:CONFIG     | through `datasets`, the only source that may use a network |

In a folder the files of the split asked for are read (`train.jsonl`, `train-00001.parquet`) when some are
named so; a folder without such names is all `train`. Local files are parsed here and not by `datasets`, which
would leave cache files and name no line. Nothing is unpickled and no code of a data set is run. Messages name
the file and the line, never the content.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from umbel.errors import ConfigError, DataError

Row = dict[str, Any]

MAX_LINE_BYTES = 64 * 1024 * 1024  # a longer line is a file of another kind, not a row
TEXT_CHUNK_CHARS = 2000
_DEMO = Path(__file__).parent / "demo"
_TABLE_KEYS = ("data", "rows", "train", "examples", "instances")
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def load_rows(source: str, *, split: str = "train", limit: int = 0) -> list[Row]:
    """Return the rows of `source`, at most `limit` of them (0 = all), in the order of the files.

    Raises DataError when the source is missing, empty or unreadable, ConfigError for a negative limit.
    """
    if limit < 0:
        raise ConfigError(
            "data.limit", "is negative", got=limit, allowed=">= 0", remedy="Use 0 for all rows."
        )
    if source.startswith("hub:"):
        rows = _hub_rows(source, split, limit)
    elif source.startswith("demo:"):
        rows = list(islice(_read_file(_demo_file(source)), limit or None))
    else:
        rows = list(islice(_local_rows(Path(source).expanduser(), split), limit or None))
    if not rows:
        raise DataError(
            f"{source} holds no rows, got 0 for the split {split!r}. Give a source with at least one row."
        )
    return rows


def demo_sites() -> list[str]:
    """Return the names of the built-in sites, sorted; `load_rows("demo:" + name)` reads one."""
    return sorted(path.stem for path in _DEMO.glob("*.jsonl"))


def data_files(folder: str | Path) -> list[Path]:
    """Return the folder's files of a known kind, sorted by name; hidden files and subfolders are left out."""
    return sorted(
        path
        for path in Path(folder).expanduser().iterdir()
        if path.is_file() and path.suffix.lower() in _READERS and not path.name.startswith(".")
    )


def _demo_file(source: str) -> Path:
    name = source.removeprefix("demo:")
    if name not in demo_sites():
        raise DataError(f"{source!r} is not a built-in site, got {name!r}. Known: {', '.join(demo_sites())}.")
    return _DEMO / f"{name}.jsonl"


def _local_rows(path: Path, split: str) -> Iterator[Row]:
    if path.is_dir():
        for file in _files_of_split(path, split):
            yield from _whole_text(file) if file.suffix.lower() == ".txt" else _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    else:
        raise DataError(
            f"There is no file or folder {str(path)!r}. Allowed: a file ({_kinds()}), a folder of them, "
            f"demo:NAME or hub:ORG/NAME. Check the path on this site's machine."
        )


def _files_of_split(folder: Path, split: str) -> list[Path]:
    files = data_files(folder)
    if not files:
        raise DataError(f"The folder {str(folder)!r} holds no data file. Allowed: {_kinds()}. Put one there.")
    named = {file: _split_name(file) for file in files}
    if not any(named.values()):
        chosen = files if split == "train" else []
    else:
        chosen = [file for file in files if named[file] == split]
    if not chosen:
        names = [file.name for file in files]
        raise DataError(
            f"The folder {str(folder)!r} has no file of the split {split!r}, got {names!r}. "
            f"Allowed: file names that begin with the split. Ask for another split or name a file."
        )
    return chosen


def _split_name(file: Path) -> str | None:
    word = re.split(r"[-_.]", file.stem, maxsplit=1)[0].lower()
    return word if word in _SPLITS else None


def _read_file(path: Path) -> Iterator[Row]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} is of an unknown kind, got {path.suffix!r}. Allowed: {_kinds()}. Convert the file."
        )
    try:
        yield from reader(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Check its permissions."
        ) from error


def _kinds() -> str:
    return " ".join(_READERS)


def _decode(path: Path, raw: bytes, first_line: int = 1) -> str:
    """Decode UTF-8, or UTF-16 that begins with its mark; the mark itself is removed."""
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line} is not {encoding.removesuffix('-sig').upper()} text, got the byte "
            f"{raw[error.start : error.start + 1]!r}. Allowed: UTF-8. Save the file as UTF-8."
        ) from None


def _parse(path: Path, line: int, text: str) -> Row:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        column = getattr(error, "colno", 1)
        raise DataError(
            f"{path}, line {line}, column {column} is not JSON: {reason}. "
            f"Allowed: one JSON object a line. Correct or remove the line."
        ) from None
    return _object(path, f"line {line}", value)


def _object(path: Path, where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"{path}, {where} is not an object, got a {type(value).__name__}. "
            f'Allowed: objects such as {{"question": "...", "answer": "..."}}. Correct or remove it.'
        )
    return value


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        if file.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):  # type: ignore[attr-defined]
            file = io.BytesIO(_decode(path, file.read()).encode())  # type: ignore[assignment]
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {number} is too long, got more than {MAX_LINE_BYTES} bytes. "
                    f"Allowed: one row a line. Split the file into lines."
                )
            text = _decode(path, raw, number).strip()
            if text:
                yield _parse(path, number, text)


def _read_json(path: Path) -> Iterator[Row]:
    """Read a list of objects, an object with one under a key like "data", or lines of JSON."""
    try:
        value = json.loads(_decode(path, path.read_bytes()))
    except (ValueError, RecursionError):
        yield from _read_jsonl(path)
        return
    if isinstance(value, dict):
        lists = [value[key] for key in _TABLE_KEYS if isinstance(value.get(key), list)]
        value = lists[0] if lists else [value]
    if not isinstance(value, list):
        raise DataError(
            f"{path} is not a list of objects, got a {type(value).__name__}. Save the rows as a list."
        )
    for i, entry in enumerate(value, start=1):
        yield _object(path, f"entry {i}", entry)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    # newline="" semantics: quoted fields may hold line breaks.
    reader = csv.DictReader(
        io.StringIO(_decode(path, path.read_bytes()), newline=""), delimiter=delimiter, strict=True
    )
    try:
        for row in reader:
            if None in row or None in row.values():
                columns = len(reader.fieldnames or ())
                got = columns + len(row[None]) if None in row else sum(v is not None for v in row.values())  # type: ignore[index]
                raise DataError(
                    f"{path}, line {reader.line_num} has the wrong number of fields, got {got}. "
                    f"Allowed: {columns}, as in the header. Quote fields that hold the delimiter."
                )
            yield dict(row)
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num} is not valid CSV: {error}. Correct the line."
        ) from None


def _read_tsv(path: Path) -> Iterator[Row]:
    return _read_csv(path, "\t")


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0][:200]
        raise DataError(f"{path} is not a readable Parquet file: {reason} Write the file again.") from None


def _read_txt(path: Path) -> Iterator[Row]:
    """Split at blank lines; neighbouring paragraphs share a row until it has TEXT_CHUNK_CHARS characters."""
    chunk: list[str] = []
    size = 0
    for paragraph in re.split(r"\n[ \t]*\n\s*", _decode(path, path.read_bytes()).replace("\r\n", "\n")):
        text = paragraph.strip()
        if chunk and size + len(text) > TEXT_CHUNK_CHARS:
            yield {"text": "\n\n".join(chunk)}
            chunk, size = [], 0
        if text:
            chunk.append(text)
            size += len(text) + 2
    if chunk:
        yield {"text": "\n\n".join(chunk)}


def _whole_text(path: Path) -> Iterator[Row]:
    text = _decode(path, path.read_bytes()).strip()
    if text:
        yield {"text": text}


def _hub_rows(source: str, split: str, limit: int) -> list[Row]:
    name, _, config = source.removeprefix("hub:").partition(":")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise DataError(
            f"{source!r} names no data set, got {name!r}. Allowed: hub:ORG/NAME. Correct the name."
        )
    import datasets

    wanted = f"{split}[:{limit}]" if limit else split
    try:
        table = datasets.load_dataset(name, config or None, split=wanted)
    except Exception as error:  # the library raises a dozen unrelated types for one cause: it is not there
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise DataError(
            f"{source} (split {split!r}) cannot be loaded: {reason}. Allowed: a public data set "
            f"or one in this machine's cache. Check the name and the network, or give a file."
        ) from error
    return [dict(row) for row in table]


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
