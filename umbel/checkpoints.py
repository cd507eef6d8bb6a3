"""Reading a run's checkpoints: verified before they are believed. `server_app.checkpoint` writes them.

    checkpoints/round-000007/
        state.safetensors      the global state
        strategy.safetensors   what the method remembers
        manifest.json          round, attempt, sites' settled work, statistics, hashes of the two files

`load_newest` takes the newest folder whose hashes agree; a bad one is renamed `*.corrupt`, loudly, and the one
before is taken. Never is a damaged checkpoint read as a fresh start. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from umbel.digest import state_crc
from umbel.errors import UmbelError
from umbel.tensorfile import load_tensors

log = logging.getLogger("umbel.checkpoints")

FORMAT = 1


class CheckpointError(UmbelError):
    """No usable checkpoint where one was asked for, or none could be written."""


@dataclass
class Memory:
    """All that a resume needs, besides the configuration."""

    round: int
    attempt: int
    state: dict[str, np.ndarray]
    strategy: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


def read(folder: Path) -> Memory:
    """Read and verify one checkpoint; raises CheckpointError naming what is wrong with it."""
    try:
        text, _, seal = (folder / "manifest.json").read_bytes().rpartition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != seal:
            raise CheckpointError(f"{folder.name}: the manifest is damaged")
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder.name}: format {manifest['format']} is not {FORMAT}")
        parts = {}
        for name, want in manifest["files"].items():
            data = (folder / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != want:
                raise CheckpointError(f"{folder.name}: {name} is damaged")
            parts[name] = load_tensors(data)
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder.name}: {type(error).__name__}: {error}") from error
    state = parts["state.safetensors"]
    if state_crc(state) != manifest["state_crc"]:
        raise CheckpointError(f"{folder.name}: the state is not the one that was saved")
    return Memory(
        manifest["round"], manifest["attempt"], state, parts["strategy.safetensors"], manifest["meta"]
    )


def load_newest(root: Path) -> Memory | None:
    """Return the newest good checkpoint, or None when there never was one.

    Raises CheckpointError when there are checkpoints and none is good: going on from nothing would be silent loss.
    """
    bad = list(root.glob("*.corrupt")) if root.is_dir() else []
    for folder in sorted(root.glob("round-[0-9]*"), reverse=True) if root.is_dir() else []:
        if folder.suffix == ".corrupt":
            continue
        try:
            return read(folder)
        except CheckpointError as error:
            set_aside = folder.with_name(folder.name + ".corrupt")
            shutil.rmtree(set_aside, ignore_errors=True)
            os.rename(folder, set_aside)
            bad.append(set_aside)
            log.error("checkpoint set aside as %s: %s", set_aside.name, error)
    if bad:
        raise CheckpointError(
            f"all {len(bad)} checkpoints in {root.name}/ are damaged and were set aside as *.corrupt. "
            "Restore one from a backup, or start a new run under another name."
        )
    return None
