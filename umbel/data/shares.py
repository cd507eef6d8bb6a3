"""Which rows a simulated site holds: one function for the sites themselves and for whoever compares with them.

Several files, or the built-in demo, are dealt one to a site (natural, non-IID); with more sites than files, the sites
of one file share it at random. A single source is shared by `data.partition`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from umbel.errors import Refusal, RefusalKind

if TYPE_CHECKING:
    from umbel.config import Config
    from umbel.data.readers import Row

PUBLIC_SOURCES = ("demo:", "hub:", "stdlib:")


def assign(source: str, partition: str, index: int, count: int) -> tuple[str, str, tuple[int, int], str]:
    """Return (name, source, share, scheme) of simulated site `index` of `count`.

    `share` is (i, n): the site takes part i of n of its source by `scheme`. Raises Refusal for an empty folder.
    """
    from umbel.data.partition import files_of
    from umbel.data.sources import demo_sites

    if source == "demo:":
        parts = [f"demo:{n}" for n in demo_sites()]
    elif (
        partition in ("auto", "file")
        and not source.startswith(PUBLIC_SOURCES)
        and Path(source).expanduser().is_dir()
    ):
        parts = [str(p) for p in files_of(Path(source).expanduser())]
        if not parts:
            raise Refusal(RefusalKind.NO_DATA, f"the folder {source!r} has no data file")
    else:
        scheme = "iid" if partition in ("auto", "file") else partition
        return f"site-{index + 1:03d}", source, (index, count), scheme
    kind, turn = index % len(parts), index // len(parts)
    sharing = len(range(kind, count, len(parts)))
    stem = parts[kind].removeprefix("demo:") if parts[kind].startswith("demo:") else Path(parts[kind]).stem
    name = stem if sharing == 1 else f"{stem}-{turn + 1:03d}"
    return name, parts[kind], (turn, sharing), "iid"


def rows_of_share(source: str, share: tuple[int, int], scheme: str, config: Config) -> list[Row]:
    """Return a site's raw rows in order, cut to `data.limit`; raises DataError when the source cannot be read."""
    from umbel.data.partition import partition
    from umbel.data.sources import load_rows

    d = config.data
    rows = load_rows(source)
    index, count = share
    if count > 1:
        parts = partition(
            rows, count, scheme, seed=config.run.seed, alpha=d.dirichlet_alpha, column=d.label_column
        )
        rows = [rows[i] for i in parts[index]]
    return rows[: d.limit] if d.limit else rows
