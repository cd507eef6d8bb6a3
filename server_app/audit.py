"""Keeping every accepted update (`telemetry.keep-updates`), so that each committed state can be recomputed later.

    updates/round-000003-0001/000.frame      frames in canonical order, as they entered the sum
    updates/round-000003-0001/index.json     their keys (site names) and weights
    updates/start.frame                      the state before round 1

Meant for audits and tests: it takes the disk space of everything that was received. `server_app.checker` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import compression
from compression import Layout
from umbel.fsio import write_atomic

FOLDER = "updates"


def round_folder(run: Path, round_index: int, attempt: int) -> Path:
    """Return the folder of one attempt's updates."""
    return run / FOLDER / f"round-{round_index:06d}-{attempt:04d}"


def keep_start(run: Path, state: Mapping[str, np.ndarray], layout: Layout) -> None:
    """Write the state that round 1 starts from."""
    write_atomic(run / FOLDER / "start.frame", compression.encode(state, layout, "exact"))


def keeper(run: Path) -> Callable[[int, int, str, float, bytes], None]:
    """Return the function that keeps one update of a commit; it is called in canonical order."""

    def keep(round_index: int, attempt: int, key: str, weight: float, frame: bytes) -> None:
        folder = round_folder(run, round_index, attempt)
        index = folder / "index.json"
        known = json.loads(index.read_text("utf-8")) if index.exists() else []
        write_atomic(folder / f"{len(known):03d}.frame", frame)
        write_atomic(index, json.dumps([*known, {"key": key, "weight": weight}]).encode())

    return keep
