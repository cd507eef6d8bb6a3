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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbel.checkpoints import FORMAT, CheckpointError, Memory
from umbel.digest import state_crc
from umbel.fsio import fsync_folder, write_durable
from umbel.tensorfile import dump_tensors

log = logging.getLogger("umbel.server")


def _name(round_index: int) -> str:
    return f"round-{round_index:06d}"


def save(root: Path, memory: Memory, *, keep: int) -> tuple[Path, int]:
    """Write one checkpoint and return (folder, bytes). Raises OSError when the disk refuses; nothing is torn then."""
    root.mkdir(parents=True, exist_ok=True)
    target = root / _name(memory.round)
    temporary = root / f".{target.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        files = {
            "state.safetensors": dump_tensors(memory.state),
            "strategy.safetensors": dump_tensors(memory.strategy),
        }
        hashes = {}
        for name, data in files.items():
            write_durable(temporary / name, data)
            hashes[name] = hashlib.sha256(data).hexdigest()
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
    return target, sum(len(d) for d in files.values()) + len(text)


def _prune(root: Path, keep: int) -> None:
    for old in sorted(root.glob("round-[0-9]*"))[:-keep]:
        if old.suffix != ".corrupt":
            shutil.rmtree(old, ignore_errors=True)
    for stray in root.glob(".round-*"):
        shutil.rmtree(stray, ignore_errors=True)


class Writer:
    """Saves checkpoints and survives a full disk for a while: the old one stays good, the run goes on, loudly."""

    def __init__(self, root: Path, *, keep: int, max_failures: int = 3) -> None:
        self.root, self.keep, self.max_failures = root, keep, max_failures
        self.failures = 0

    def save(self, memory: Memory) -> int | None:
        """Save and return the bytes written, or None when the disk refused. Raises after `max_failures` in a row."""
        try:
            _, size = save(self.root, memory, keep=self.keep)
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
    free = ("run.rounds", "run.name", "run.output-dir", "run.resume", "run.max-consecutive-skips")
    free += ("run.checkpoint-every", "run.keep-checkpoints")
    groups = ("run.", "model.", "data.", "lora.", "train.", "compression.")
    named = ("clients.weighting", "clients.normalise", "clients.late", "clients.staleness-exponent")
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(set(old) | set(new))
        if key not in free and (key.startswith(groups) or key in named) and old.get(key) != new.get(key)
    ]
