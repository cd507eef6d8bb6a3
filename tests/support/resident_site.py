"""Instructions for one site and its resident worker, without Flower: what a SuperNode's messages would bring."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import compression
from client_app.resident import progress
from client_app.resident.client import COMMAND, ROOT, ask, site_of
from client_app.resident.processes import Process, alive, process
from umbel.config import Config, to_json
from umbel.config.load import resolve
from umbel.digest import state_crc
from umbel.messages import JOIN, TRAIN, Instruction, Reply

SETTINGS = [
    "run.name=r",
    "data.max-length=128",
    "data.limit=60",
    "train.threads=1",
    "train.learning-rate=0.01",
    "train.batch-size=4",
    "train.optimizer-state=keep",
]


def settings(*overrides: str) -> Config:
    """Return the configuration of a small run."""
    return resolve(None, [*SETTINGS, *overrides])


def order(config: Config, arrays: dict, round_index: int, **fields: Any) -> tuple[Instruction, bytes]:
    """Return the training instruction of one round and its frame."""
    layout = layout_of(config)
    base = state_crc(arrays)
    frame = compression.encode(arrays, layout, "exact", seed=0, round_index=round_index, base=base)
    values: dict[str, Any] = {
        "run": "r",
        "round": round_index,
        "attempt": 1,
        "base": base,
        "site": "clinic",
        "remaining_seconds": 60.0,
        "config": to_json(config),
        "layout": layout.digest(),
        "settled": f"[{round_index - 1}, 1]" if round_index > 1 else "[0, 0]",
        "directives": '{"first_step": 0, "total_steps": 100}',
    }
    return Instruction(**(values | fields)), frame


def joining(config: Config) -> Instruction:
    """Return the instruction that asks a site who it is."""
    return Instruction("r", 0, 0, "", "", 60.0, config=to_json(config))


_layouts: dict[str, Any] = {}


def start_state(config: Config) -> dict:
    """Return the tensors every site starts from."""
    from client_app.workbench import load_site_model
    from umbel.models.state import read_state

    loaded = load_site_model(config)
    _layouts[to_json(config, ("model", "lora"))] = loaded.layout
    return read_state(loaded.model, config.train.mode)


def layout_of(config: Config) -> Any:
    """Return the layout of the exchanged tensors."""
    if to_json(config, ("model", "lora")) not in _layouts:
        start_state(config)
    return _layouts[to_json(config, ("model", "lora"))]


class Desk:
    """One site's desk: hands instructions to its worker as the process of a message would."""

    def __init__(
        self, folder: Path, *, root: Path = ROOT, command: tuple[str, ...] = COMMAND, **node: Any
    ) -> None:
        self.node = {"name": "clinic", "data": "demo:clinic", "state-dir": str(folder / "state"), **node}
        self.command, self.root = command, root
        self.owner = process(os.getpid())

    @property
    def place(self) -> Any:
        return site_of(self.node, 1).place

    def ask(self, kind: str, instruction: Any, frame: bytes | None = None, **extra: Any) -> tuple[Reply, Any]:
        """Return the worker's answer."""
        extra = {"root": self.root, "owner": self.owner, "command": self.command, **extra}
        return ask(kind, instruction, frame, node_config=self.node, node_id=1, **extra)

    def rounds(self, config: Config, count: int, between: Callable[[], None] = lambda: None) -> list[bytes]:
        """Return the update frames of `count` rounds, each from the state the last one ended with."""
        arrays, frames = start_state(config), []
        for round_index in range(1, count + 1):
            instruction, frame = order(config, arrays, round_index)
            reply, update = self.ask(TRAIN, instruction, frame)
            assert reply.status == "ok", reply.reason
            frames.append(update)
            arrays = compression.decode(update, layout_of(config))
            between()
        return frames

    def join(self, config: Config) -> Reply:
        """Ask who the site is."""
        return self.ask(JOIN, joining(config))[0]

    def facts(self) -> dict[str, Any] | None:
        """Return what the worker says about itself."""
        return progress.read(self.place.file("json"))

    def worker(self) -> Process:
        """Return the running worker."""
        facts = self.facts()
        assert facts is not None, "no worker has written its progress file"
        return Process(facts["pid"], facts["start"])

    def log(self) -> str:
        """Return the worker's own log."""
        path = self.place.file("log")
        return path.read_text("utf-8") if path.exists() else ""

    def close(self) -> None:
        """End the worker, if there is one."""
        facts = self.facts()
        if facts:
            known = Process(facts["pid"], facts["start"])
            if alive(known):
                os.kill(known.pid, 15)
            until(lambda: not alive(known), "the worker leaves")


def until(true: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    """Wait for something that must happen; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"did not happen in {seconds} s: {what}"
        time.sleep(0.02)


def script(folder: Path, text: str) -> tuple[str, ...]:
    """Return a command that runs a worker around a service of the test's own."""
    path = folder / "worker_script.py"
    path.write_text(
        "import json, sys, time\n"
        "from client_app.resident.worker import Settings, Worker\n"
        "from client_app.replies import blank_reply\n"
        f"{text}\n"
        "sys.exit(Worker(Settings(**json.loads(sys.argv[1])), Service).run())\n"
    )
    return (sys.executable, "-P", str(path))


def renamed(instruction: Instruction, **fields: Any) -> Instruction:
    """Return a changed copy."""
    return replace(instruction, **fields)
