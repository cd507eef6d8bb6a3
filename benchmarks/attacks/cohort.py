"""A small federation in one process some of whose members answer otherwise than their own work says.

A liar is a function (round, start, own, honest) -> arrays: the state the round started from, what its own training
gave, and what the honest sites sent in this round (liars come last and know everything: the strongest adversary that
the rules of the literature are measured against).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Liar = Callable[[int, Arrays, Arrays, list[Arrays]], Arrays]
Rows = list[dict[str, str]]


def demo_rows(seed: int) -> tuple[Rows, Rows]:
    """Return (training rows, held-out rows) of all built-in sites together, as questions and answers, shuffled."""
    from umbel.data.formats import detect_format, to_messages
    from umbel.data.sources import demo_sites, load_rows
    from umbel.seeds import generator

    rows: Rows = []
    for site in demo_sites():
        own = load_rows(f"demo:{site}")
        kind = detect_format(own)
        for turns in (to_messages(row, kind) for row in own):
            said = {turn["role"]: turn["content"] for turn in turns or ()}
            rows.append({"question": said["user"], "answer": said["assistant"]})
    rows = [rows[i] for i in generator(seed, "attack-rows").permutation(len(rows))]
    return rows[90:], rows[:90]


def write_rows(path: Path, rows: Rows) -> Path:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Cohort:
    """Sites with rows of their own; `liars` maps a name to what it does to its answer."""

    def __init__(
        self,
        folder: Path,
        rows: dict[str, Rows],
        liars: dict[str, Liar],
        poison: dict[str, Any] | None = None,
    ) -> None:
        """`poison` maps a name to (rows, rounds): what it trains on in those rounds instead of its own."""
        self.folder, self.liars, self.poison = folder, liars, poison or {}
        self.names = sorted(rows, key=lambda name: (name in liars, name))
        self.sources = {n: write_rows(folder / "data" / f"{n}.jsonl", r) for n, r in rows.items()}
        self.poisoned = {
            n: write_rows(folder / "data" / f"{n}-poison.jsonl", r) for n, (r, _) in self.poison.items()
        }
        self.states: dict[int, Arrays] = {}
        self._honest: dict[int, list[Arrays]] = {}

    def run(self, settings: Sequence[str]) -> Any:
        """Run to the end and return the session; `self.states` holds the state after every round."""
        from support.fakegrid import FakeGrid, FakeSite, VirtualClock, app_site

        from server_app.run import Session
        from umbel.config import resolve

        clock = VirtualClock()
        grid = FakeGrid(clock)
        for number, name in enumerate(self.names, start=1):
            own = app_site(number, self._node(name, self.sources[name]))
            bad = app_site(number, self._node(name, self.poisoned[name])) if name in self.poison else own
            grid.sites[number] = FakeSite(self._answer(name, own, bad))
        output = f"run.output-dir={self.folder / 'run'}"
        config = resolve(None, [*settings, f"clients.minimum={len(self.names)}", output])

        def keep(point: str, index: int) -> None:
            if point == "after_commit":
                self.states[index] = {k: v.copy() for k, v in session.engine.state.items()}

        session = Session(config, grid, simulated=True, now=clock.now, sleep=clock.sleep, fault=keep)
        with self._lying():
            code = session.run()
        if code:
            raise RuntimeError(session.history.reason)
        return session

    def _node(self, name: str, source: Path) -> dict[str, str]:
        state = str(self.folder / "state" / name)
        return {"name": name, "data": str(source), "state-dir": state, "resident": "off"}

    def _answer(self, name: str, own: Any, bad: Any) -> Any:
        from umbel.messages import CONTROL_RECORD, TRAIN, Instruction, from_record

        def handle(kind: str, message: Any) -> Any:
            order = from_record(Instruction, message.content[CONTROL_RECORD])
            active = name in self.poison and kind == TRAIN and order.round in self.poison[name][1]
            return (bad if active else own)(kind, message)

        return handle

    @contextlib.contextmanager
    def _lying(self) -> Iterator[None]:
        """Change what liars say between their work and its encoding, as somebody would who owns the machine."""
        import client_app.train_round as site
        from umbel.models.state import read_state

        honest_work = site.local_work

        def work(trains: str, model: Any, rows: Any, config: Any, *args: Any, **options: Any) -> Any:
            start = {n: a.copy() for n, a in read_state(model, config.train.mode).items()}
            result = honest_work(trains, model, rows, config, *args, **options)
            name, index = options["site"], options["round_index"]
            known = self._honest.setdefault(index, [])
            if name in self.liars:
                result.arrays = self.liars[name](index, start, result.arrays, known)
            else:
                known.append({n: a.copy() for n, a in result.arrays.items()})
            return result

        site.local_work = work
        try:
            yield
        finally:
            site.local_work = honest_work


def moved(start: Arrays, deltas: Arrays) -> Arrays:
    """Return start + deltas in the dtypes of `start`."""
    return {n: (a.astype(np.float64) + deltas[n]).astype(a.dtype) for n, a in start.items()}


def differences(start: Arrays, values: Arrays) -> Arrays:
    """Return values - start in float64."""
    return {n: values[n].astype(np.float64) - a.astype(np.float64) for n, a in start.items()}
