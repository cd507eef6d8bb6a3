"""Cut one data set into sites, for simulation. Every row goes to exactly one part, and no part is empty.

| scheme    | part of a row                                                                                |
|-----------|----------------------------------------------------------------------------------------------|
| iid       | shuffled, then dealt: sizes differ by at most one                                            |
| dirichlet | for each label of `column` shares p ~ Dirichlet(alpha) over the parts (Hsu et al. 2019,      |
|           | arXiv:1909.06335); a part that got nothing takes one row of the largest                      |
| column    | rows with the same value of `column` stay together                                           |
| file      | rows of the same file (`groups`) stay together; with as many parts as files, part i = file i |

Small alpha = each site sees few labels; alpha -> infinity tends to iid. It does not model quantity skew
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from umbel.data.digest import canonical_json
from umbel.data.sources import data_files
from umbel.errors import ConfigError, DataError
from umbel.seeds import generator

SCHEMES = ("iid", "dirichlet", "column", "file")


def files_of(folder: str | Path) -> list[Path]:
    """Return the data files of a folder, sorted by name: one file a site, the natural federation.

    Raises DataError when the folder does not exist or holds none.
    """
    if not Path(folder).expanduser().is_dir():
        raise DataError(f"There is no folder {str(folder)!r}. Give the folder that holds one file a site.")
    files = data_files(folder)
    if not files:
        raise DataError(f"The folder {str(folder)!r} holds no data file. Put one file a site there.")
    return files


def partition(
    rows: Sequence[Mapping[str, Any]],
    num_parts: int,
    scheme: str = "iid",
    *,
    seed: int = 0,
    alpha: float = 0.5,
    column: str = "",
    groups: Sequence[str] | None = None,
) -> list[list[int]]:
    """Return `num_parts` ascending lists of row indices; a pure function of the arguments.

    groups: for `file`, the file each row came from. Raises ConfigError for a wrong setting, DataError when
    there are fewer rows (or groups) than parts or the column is missing.
    """
    if num_parts < 1:
        raise ConfigError(
            "num_parts", "is too small", got=num_parts, allowed=">= 1", remedy="Give one part a site."
        )
    if len(rows) < num_parts:
        raise DataError(
            f"{num_parts} parts need at least {num_parts} rows, got {len(rows)}. Use fewer parts."
        )
    rng = generator(seed, "partition", scheme)
    if scheme == "iid":
        parts = [np.sort(part).tolist() for part in np.array_split(rng.permutation(len(rows)), num_parts)]
    elif scheme == "dirichlet":
        parts = _dirichlet(_labels(rows, column), num_parts, alpha, rng)
    elif scheme == "column":
        parts = _whole_groups(_labels(rows, column), num_parts)
    elif scheme == "file":
        parts = _whole_groups(_checked_groups(rows, groups), num_parts)
    else:
        raise ConfigError(
            "scheme", "is not a known partition", got=scheme, allowed=", ".join(SCHEMES), remedy="Choose one."
        )
    return parts


def _labels(rows: Sequence[Mapping[str, Any]], column: str) -> list[str]:
    missing = sum(1 for row in rows if column not in row)
    if missing:
        columns = sorted({str(key) for row in rows for key in row})
        raise DataError(
            f"The column {column!r} to partition by is missing in {missing} rows. Found: {columns!r}. "
            f"Name one of them."
        )
    return [canonical_json(row[column]).decode("utf-8", "replace") for row in rows]


def _checked_groups(rows: Sequence[Mapping[str, Any]], groups: Sequence[str] | None) -> list[str]:
    if groups is None or len(groups) != len(rows):
        got = None if groups is None else len(groups)
        raise ConfigError(
            "groups",
            "must name the file of each row",
            got=got,
            allowed=f"{len(rows)} names",
            remedy="See files_of.",
        )
    return list(groups)


def _by_label(labels: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {label: [] for label in sorted(set(labels))}
    for i, label in enumerate(labels):
        members[label].append(i)
    return members


def _dirichlet(
    labels: Sequence[str], num_parts: int, alpha: float, rng: np.random.Generator
) -> list[list[int]]:
    if not (np.isfinite(alpha) and alpha > 0):
        raise ConfigError(
            "alpha",
            "must be a positive number",
            got=alpha,
            allowed="> 0",
            remedy="Use 0.5 for a strong skew.",
        )
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for members in _by_label(labels).values():
        shares = rng.dirichlet(np.full(num_parts, alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for part, piece in zip(parts, np.split(rng.permutation(members), cuts), strict=True):
            part.extend(piece.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [sorted(part) for part in parts]


def _whole_groups(labels: Sequence[str], num_parts: int) -> list[list[int]]:
    """Give each group whole to a part: one each in sorted order, or largest first to the smallest part."""
    members = _by_label(labels)
    if len(members) < num_parts:
        raise DataError(
            f"{num_parts} parts need {num_parts} different groups, got {len(members)}. Use fewer parts."
        )
    if len(members) == num_parts:
        return list(members.values())
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for label in sorted(members, key=lambda name: (-len(members[name]), name)):
        min(parts, key=len).extend(members[label])
    return [sorted(part) for part in parts]
