"""Rows out of files, folders, the built-in demonstration or a data hub.

| source                              | rows                                                             |
|-------------------------------------|------------------------------------------------------------------|
| file.jsonl .json .csv .tsv .parquet | one object, line or record a row                                 |
| file.txt                            | {"text": ...} chunks of whole paragraphs, up to 2,000 characters |
| folder                              | its files in sorted order; a .txt there is one document, one row |
| demo:NAME                           | the built-in site NAME                                           |
| hub:ORG/NAME or hub:ORG/NAME:CONFIG | through `datasets`, the only source that may use a network       |

In a folder the files of the split asked for are read (`train.jsonl`, `train-00001.parquet`) when some are
named so; a folder without such names is all `train`. Local files are parsed here and not by `datasets`, which
would leave cache files and name no line. Nothing is unpickled and no code of a data set is run. Messages name
the file and the line, never the content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from umbel.data.readers import READERS, Row, known_kinds, read_file, read_whole_text
from umbel.errors import ConfigError, DataError

_DEMO = Path(__file__).parent / "demo"
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
        rows = list(islice(read_file(_demo_file(source)), limit or None))
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
        if path.is_file() and path.suffix.lower() in READERS and not path.name.startswith(".")
    )


def _demo_file(source: str) -> Path:
    name = source.removeprefix("demo:")
    if name not in demo_sites():
        raise DataError(f"{source!r} is not a built-in site, got {name!r}. Known: {', '.join(demo_sites())}.")
    return _DEMO / f"{name}.jsonl"


def _local_rows(path: Path, split: str) -> Iterator[Row]:
    if path.is_dir():
        for file in _files_of_split(path, split):
            yield from read_whole_text(file) if file.suffix.lower() == ".txt" else read_file(file)
    elif path.is_file():
        yield from read_file(path)
    else:
        raise DataError(
            f"There is no file or folder {str(path)!r}. Allowed: a file ({known_kinds()}), a folder of them, "
            f"demo:NAME or hub:ORG/NAME. Check the path on this site's machine."
        )


def _files_of_split(folder: Path, split: str) -> list[Path]:
    files = data_files(folder)
    if not files:
        raise DataError(
            f"The folder {str(folder)!r} holds no data file. Allowed: {known_kinds()}. Put one there."
        )
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
