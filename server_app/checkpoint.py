"""Writing the server's memory: one folder a checkpoint, whole or absent (format: `umbel.checkpoints`).

Written under a temporary name, each file fsynced, renamed, the parent fsynced. A disk that refuses leaves the old
checkpoint as it was.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from server_app.background import Background
from umbel.checkpoints import FORMAT, CheckpointError, Memory
from umbel.digest import state_crc
from umbel.fsio import fsync_folder, write_durable
from umbel.tensorfile import write_tensors

log = logging.getLogger("umbel.server")


def _name(round_index: int) -> str:
    return f"round-{round_index:06d}"


def save(
    root: Path, memory: Memory, *, keep: int, half_way: Callable[[], Any] = lambda: None
) -> tuple[Path, int]:
    """Write one checkpoint and return (folder, bytes). Raises OSError when the disk refuses; nothing is torn then.

    `half_way` is called when the tensors are written and the manifest is not.
    """
    root.mkdir(parents=True, exist_ok=True)
    target = root / _name(memory.round)
    temporary = root / f".{target.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        hashes, size = {}, 0
        for name, arrays in (
            ("state.safetensors", memory.state),
            ("strategy.safetensors", memory.strategy),
        ):
            hashes[name], num_bytes = write_tensors(temporary / name, arrays)
            size += num_bytes
        half_way()
        manifest = {
            "format": FORMAT,
            "round": memory.round,
            "attempt": memory.attempt,
            "state_crc": state_crc(memory.state),
            "files": hashes,
            "meta": memory.meta,
        }
        text = json.dumps(manifest, sort_keys=True).encode()
        seal = hashlib.sha256(text).hexdigest().encode()
        write_durable(temporary / "manifest.json", text + b"\n" + seal)
        fsync_folder(temporary)
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
        fsync_folder(root)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _prune(root, keep)
    return target, size + len(text)


def _prune(root: Path, keep: int) -> None:
    for old in sorted(root.glob("round-[0-9]*"))[:-keep]:
        if old.suffix != ".corrupt":
            shutil.rmtree(old, ignore_errors=True)
    for stray in root.glob(".round-*"):
        shutil.rmtree(stray, ignore_errors=True)


class Written(NamedTuple):
    """What became of one submitted checkpoint; `num_bytes` None when the disk refused it."""

    round: int
    num_bytes: int | None
    seconds: float


class Writer:
    """Saves checkpoints and survives a full disk for a while: the old one stays good, the run goes on, loudly.

    `submit` hands a checkpoint to a thread, at most one at a time; `wait` returns when it is durable. The caller
    must not tell a site that an update counts before `wait` has returned. `check` is called before each write and
    may raise to forbid it.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        max_failures: int = 3,
        check: Callable[[], None] = lambda: None,
        half_way: Callable[[int], Any] = lambda round_index: None,
    ) -> None:
        self.root, self.keep, self.max_failures = root, keep, max_failures
        self.failures = 0
        self._check, self._half_way = check, half_way
        self._work: Background[Written] = Background("umbel-checkpoint")

    def submit(self, memory: Memory) -> None:
        """Begin to save `memory`, whose arrays must not be changed from now on; the one before is taken in by `wait`."""
        self._work.start(lambda: self._written(memory))

    def wait(self) -> Written | None:
        """Return what became of the submitted checkpoint once it is durable or refused; None without one.

        Raises what the write raised: CheckpointError after `max_failures` in a row.
        """
        return self._work.finish()

    def _written(self, memory: Memory) -> Written:
        began = time.monotonic()
        size = self.save(memory)
        return Written(memory.round, size, time.monotonic() - began)

    def save(self, memory: Memory) -> int | None:
        """Save and return the bytes written, or None when the disk refused. Raises after `max_failures` in a row."""
        self._check()
        try:
            _, size = save(self.root, memory, keep=self.keep, half_way=lambda: self._half_way(memory.round))
        except OSError as error:
            self.failures += 1
            why = {errno.ENOSPC: "the disk is full", errno.EROFS: "the disk is read-only"}.get(
                error.errno or 0, str(error)
            )
            log.error(
                "checkpoint of round %d not written (%d in a row): %s", memory.round, self.failures, why
            )
            if self.failures >= self.max_failures:
                raise CheckpointError(
                    f"{self.failures} checkpoints in a row could not be written: {why}"
                ) from error
            return None
        self.failures = 0
        return size


def trajectory_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys that shape the result and differ, as 'key: old -> new'. The number of rounds may change."""
    free = {
        "run.rounds",
        "run.name",
        "run.output-dir",
        "run.resume",
        "run.max-consecutive-skips",
        "run.checkpoint-every",
        "run.keep-checkpoints",
        # A larger budget changes when a run stops, never what it computes.
        "privacy.budget-epsilon",
    }
    groups = ("run.", "model.", "data.", "lora.", "train.", "server.", "compression.", "privacy.")
    named = {
        "clients.mode",
        "clients.weighting",
        "clients.normalise",
        "clients.late",
        "clients.staleness-exponent",
        "clients.merge",
        "clients.byzantine",
        "clients.clip-factor",
    }
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(set(old) | set(new))
        if key not in free and (key.startswith(groups) or key in named) and old.get(key) != new.get(key)
    ]
