"""`umbel compare` over real runs in one process: equal tokens, one table, nothing run twice."""

from __future__ import annotations

import json

import pytest
from support.inprocess import SETTINGS as BASE
from support.rules import SETTINGS

from umbel.cli.compare import compare, configurations
from umbel.errors import ConfigError


def in_process(folder):
    from support.fakegrid import FakeGrid, FakeSite, VirtualClock, app_site

    from server_app.run import Session

    started = []

    def run(config) -> int:
        clock = VirtualClock()
        grid = FakeGrid(clock)
        for number, name in enumerate(("clinic", "kitchen"), start=1):
            node = {"name": name, "data": f"demo:{name}", "state-dir": str(folder / name), "resident": "off"}
            grid.sites[number] = FakeSite(app_site(number, node))
        started.append(config.run.name)
        return Session(config, grid, simulated=True, now=clock.now, sleep=clock.sleep).run()

    return run, started


def test_methods_are_compared_at_equal_tokens(tmp_path) -> None:
    overrides = [*BASE, *SETTINGS, "run.rounds=1"]
    planned = configurations(None, overrides, ["fedit", "ffa", "fedask"], 1, tmp_path / "out")
    run, started = in_process(tmp_path)
    said: list[str] = []
    assert compare(planned, run, tmp_path / "out", say=said.append) == 0
    rows = {r["method"]: r for r in json.loads((tmp_path / "out" / "comparison.json").read_text())}
    assert len({r["tokens"] for r in rows.values()}) == 1
    assert rows["fedask"]["rounds_committed"] == 2
    assert rows["ffa"]["bytes_up"] < rows["fedit"]["bytes_up"]
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["fedit", "ffa", "fedask"]
    assert compare(planned, run, tmp_path / "out", say=said.append) == 0
    assert started == ["fedit-7", "ffa-7", "fedask-7"]


def test_an_unknown_method_is_refused_before_anything_runs(tmp_path) -> None:
    with pytest.raises(ConfigError, match="fedavgg"):
        configurations(None, [], ["fedavgg"], 1, tmp_path)
