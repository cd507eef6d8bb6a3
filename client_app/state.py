"""What a site must remember between rounds, on its own disk, in immutable versions.

A version is one folder `<state-dir>/<run>/<site>/v-<round>-<attempt>` with `meta.json` (data cursor, epoch) and
`tensors.safetensors` (optimiser moments and the like). It is written whole or not at all, before the update that
spent it leaves. It becomes the site's truth only when a later instruction says that the server committed that
very update (`settled`): until then it is pending, and a lost, late or refused update leaves the site exactly
where it was. The last few versions are kept because a restarted server may name an older one.

    stage(r, a)   write version (r, a); nothing else changes
    select(r, a)  the version the server names; (0, 0) is the empty start
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from umbel.errors import Refusal, RefusalKind
from umbel.fsio import fsync_folder, safe_name, write_durable
from umbel.tensorfile import dump_tensors, load_tensors

log = logging.getLogger("umbel.site")

KEEP_VERSIONS = 4
KEEP_RUN_DAYS = 30


class Snapshot(NamedTuple):
    """Durable state of a site: plain values and tensors."""

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]


class SiteState:
    """The versions of one (run, site)."""

    def __init__(self, root: Path, run: str, site: str) -> None:
        self.folder = root / safe_name(run) / safe_name(site)

    def _version(self, settled: tuple[int, int]) -> Path:
        return self.folder / f"v-{settled[0]:06d}-{settled[1]:04d}"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock of this (run, site); a second worker on the same state is refused, loudly."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Refusal(
                    RefusalKind.REFUSED,
                    f"another instruction of this run is being worked on at site {self.folder.name!r}",
                ) from None
            yield

    def select(self, settled: tuple[int, int]) -> tuple[Snapshot, bool]:
        """Return the version the server names and whether it was found.

        (0, 0) is the start and always found. A version that is gone or damaged gives the empty start and False:
        the site says so in its reply instead of guessing.
        """
        if tuple(settled) == (0, 0):
            return Snapshot({}, {}), True
        folder = self._version(settled)
        try:
            meta = json.loads((folder / "meta.json").read_text("utf-8"))
            arrays = load_tensors((folder / "tensors.safetensors").read_bytes())
        except Exception as error:
            log.warning("version %s cannot be read: %s: %s", folder.name, type(error).__name__, error)
            return Snapshot({}, {}), False
        return Snapshot(meta, arrays), True

    def stage(
        self, round_index: int, attempt: int, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Write version (round, attempt) durably; an existing one of the same name is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self._version((round_index, attempt))
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_durable(temporary / "meta.json", json.dumps(dict(meta), sort_keys=True).encode())
        write_durable(temporary / "tensors.safetensors", dump_tensors(arrays))
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
        fsync_folder(self.folder)

    def prune(self, settled: tuple[int, int], keep: int = KEEP_VERSIONS) -> None:
        """Remove leftovers and all but the `keep` newest versions; the settled one always stays."""
        if not self.folder.is_dir():
            return
        for stray in self.folder.glob(".v-*"):
            shutil.rmtree(stray, ignore_errors=True)
        versions = sorted(self.folder.glob("v-*"))
        for old in versions[:-keep]:
            if old != self._version(settled):
                shutil.rmtree(old, ignore_errors=True)


def prune_runs(root: Path, *, now: float | None = None) -> None:
    """Remove the state of runs that nothing touched for KEEP_RUN_DAYS: a site's disk must not fill by itself."""
    limit = (now if now is not None else time.time()) - KEEP_RUN_DAYS * 86_400
    for run in root.glob("*") if root.is_dir() else []:
        if not run.is_dir() or run.name.startswith("."):
            continue
        newest = max((p.stat().st_mtime for p in [run, *run.glob("*")] if p.exists()), default=limit)
        if newest < limit:
            shutil.rmtree(run, ignore_errors=True)
