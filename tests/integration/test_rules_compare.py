"""`umbel compare` over real runs in one process: equal tokens, one table, nothing run twice."""

from __future__ import annotations

import json

import pytest
from support.inprocess import SETTINGS as BASE
from support.inprocess import counted_runner
from support.rules import SETTINGS

from umbel.cli.compare import compare, configurations
from umbel.errors import ConfigError


def test_methods_are_compared_at_equal_tokens(tmp_path) -> None:
    overrides = [*BASE, *SETTINGS, "run.rounds=1"]
    planned = configurations(None, overrides, ["fedit", "ffa", "fedask"], 1, tmp_path / "out")
    run, started = counted_runner(tmp_path)
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
