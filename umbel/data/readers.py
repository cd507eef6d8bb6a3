"""Readers of single files: JSON lines, JSON, CSV, TSV, Parquet and text, each a generator of rows.

Text is UTF-8 (with or without a mark) or UTF-16 with a mark. What cannot be read is a DataError that names
file and line, never the content, since messages may leave the site. JSON lines and Parquet are streamed; the
other kinds are read whole. Nothing is guessed: no other encodings, no delimiter sniffing, no types in CSV.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from umbel.errors import DataError

Row = dict[str, Any]

MAX_LINE_BYTES = 64 * 1024 * 1024  # a longer line is a file of another kind, not a row
TEXT_CHUNK_CHARS = 2000
_TABLE_KEYS = ("data", "rows", "train", "examples", "instances")


def read_file(path: Path) -> Iterator[Row]:
    """Yield the rows of one file, chosen by its suffix; raises DataError when it cannot be read."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} is of an unknown kind, got {path.suffix!r}. Allowed: {known_kinds()}. Convert the file."
        )
    try:
        yield from reader(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Check its permissions."
        ) from error


def known_kinds() -> str:
    """Return the suffixes that can be read, for messages."""
    return " ".join(READERS)


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
            f"{path}, line {reader.reader.line_num} is not valid CSV: {error}. Correct the line."
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


def read_whole_text(path: Path) -> Iterator[Row]:
    """Yield the whole file as one row, nothing if it is blank."""
    text = _decode(path, path.read_bytes()).strip()
    if text:
        yield {"text": text}


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
