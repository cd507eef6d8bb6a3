"""A whole run in one process: the real Session over a `FakeGrid` of the project's own sites, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from server_app.run import Session
from support.fakegrid import Answer, FakeGrid, FakeSite, VirtualClock, app_site
from umbel.config import Config, resolve
from umbel.telemetry.events import read_events

SITES = ("clinic", "kitchen", "workshop")
SETTINGS = (
    "run.rounds=4",
    "run.seed=7",
    "clients.minimum=3",
    "train.local-steps=2",
    "train.batch-size=4",
    "train.learning-rate=0.01",
    "train.optimizer-state=keep",
    "train.threads=1",
    "data.max-length=96",
    "data.limit=24",
    "eval.every=0",
    "telemetry.report=false",
)


def make_session(
    folder: Path,
    *overrides: str,
    sites: Sequence[str] = SITES,
    wrap: Callable[[str, Answer], Answer] = lambda name, answer: answer,
    fault: Callable[[str, int], Any] = lambda point, round_index: None,
    source: str = "",
) -> Session:
    """Return a session in `folder/run`; the sites keep their state in `folder/state/<name>`.

    A site's data are `demo:<name>`, or `source` for all of them.
    """
    clock = VirtualClock()
    grid = FakeGrid(clock)
    for number, name in enumerate(sites, start=1):
        node = {"name": name, "data": source or f"demo:{name}", "state-dir": str(folder / "state" / name)}
        node["resident"] = "off"
        grid.sites[number] = FakeSite(wrap(name, app_site(number, node)))
    config = resolve(None, [*SETTINGS, f"run.output-dir={folder / 'run'}", *overrides])
    return Session(config, grid, simulated=True, now=clock.now, sleep=clock.sleep, fault=fault)


def commits(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the committed rounds that stand, by round."""
    last = {
        e["round"]: e
        for e in read_events(folder / "run" / "events.jsonl")
        if e["event"] == "round_committed" and e["outcome"] == "commit"
    }
    return [last[r] for r in sorted(last)]


def crcs(folder: Path) -> list[str]:
    """Return the names of the committed states, by round."""
    return [record["state_crc"] for record in commits(folder)]


def counted_runner(
    folder: Path, sites: Sequence[str] = ("clinic", "kitchen")
) -> tuple[Callable[[Config], int], list[str]]:
    """Return (what runs a configuration of `umbel compare` and gives its exit code, the names of the runs started)."""
    started: list[str] = []

    def run(config: Config) -> int:
        clock = VirtualClock()
        grid = FakeGrid(clock)
        for number, name in enumerate(sites, start=1):
            node = {"name": name, "data": f"demo:{name}", "state-dir": str(folder / name), "resident": "off"}
            grid.sites[number] = FakeSite(app_site(number, node))
        started.append(config.run.name)
        return Session(config, grid, simulated=True, now=clock.now, sleep=clock.sleep).run()

    return run, started
