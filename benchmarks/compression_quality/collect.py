"""Real updates of our own runs: what each site changed in a round, local minus global.

A service that watches its own answers: with the exact codec a site sends its values, so that the change is

    delta = float32(sent) - float32(received)

to the bit. Nothing is written; the vectors live in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import compression
from benchmarks.compression_quality.tasks import COMMON, SETTINGS, sites
from benchmarks.inprocess import run_in_process
from client_app.service import Service
from compression.layout import Layout
from compression.payload import change
from umbel.config import from_json, resolve
from umbel.messages import TRAIN, Instruction, Reply

Update = dict[str, np.ndarray]


class Watching(Service):
    """Keeps the change of every update it answers with, by (round, site)."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[tuple[int, str], Update] = {}
        self.layout: Layout | None = None

    def handle(
        self, kind: str, instruction: Instruction, frame: bytes | None, **rest: Any
    ) -> tuple[Reply, bytes | None]:
        """Answer as a site and look at what was answered."""
        reply, update = super().handle(kind, instruction, frame, **rest)
        if kind == TRAIN and update is not None and frame is not None:
            self.layout = self.bench.model(from_json(instruction.config))[0].layout
            received, sent = (compression.decode(data, self.layout) for data in (frame, update))
            self.changes[instruction.round, reply.site] = change(sent, received, self.layout)
        return reply, update


def updates(task: str, root: Path, *, rounds: int = 4, local_steps: int = 8, seed: int = 7) -> Watching:
    """Run a task with the exact codec and return the service that watched it."""
    watching = Watching()
    config = resolve(
        None,
        [
            *COMMON,
            *SETTINGS[task],
            f"run.seed={seed}",
            f"run.rounds={rounds}",
            f"train.local-steps={local_steps}",
            "eval.final=false",
            f"run.output-dir={root / 'run'}",
        ],
    )
    run_in_process(config, sites(task, root), watching)
    return watching


def large_tensors(update: Update, smallest: int = 1024) -> np.ndarray:
    """Return the matrices of an update that a lossy codec would be given, as one vector in order of names."""
    return np.concatenate(
        [update[n].reshape(-1) for n in sorted(update) if update[n].ndim > 1 and update[n].size >= smallest]
    )
