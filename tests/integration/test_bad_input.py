"""What people get wrong, through the real command line: named, refused, exit code, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def umbel(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "UMBEL_STATE": str(cwd / "state"),
        "UMBEL_RUNS": str(cwd / "runs"),
    }
    command = [sys.executable, "-m", "umbel.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["run", "smoke", "--set", "run.round=3"], 78, "Did you mean 'run.rounds'?"),
        (["run", "smoke", "--set", "run.rounds=-3"], 78, "run.rounds is out of range, got -3"),
        (["run", "smoke", "--set", "data.source=/no/such/file.jsonl"], 78, "data.source does not exist"),
        (["run", "no-such-recipe"], 78, "recipe does not exist"),
        (["show", "no-such-run"], 65, "no-such-run"),
        (["export", "no-such-run"], 65, "no-such-run"),
        (["run", "smoke", "--set", "compression.up=zip"], 78, "compression.up"),
        (["run", "smoke", "--set", "model.name=builtin:no"], 78, "builtin:tiny-llama"),
    ],
)
def test_mistakes_are_named_before_anything_starts(arguments, code, part, tmp_path) -> None:
    done = umbel(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert part in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.timeout(300)
def test_sites_without_usable_data_are_left_out_and_all_of_them_end_the_run(tmp_path) -> None:
    """Missing, empty and unreadable files: refused with the reason; the run goes on with the others, or fails."""
    rows = tmp_path / "rows"
    rows.mkdir()
    good = "".join(
        json.dumps({"question": f"What is {i} plus 1?", "answer": f"It is {i + 1}."}) + "\n"
        for i in range(40)
    )
    (rows / "good-a.jsonl").write_text(good)
    (rows / "good-b.jsonl").write_text(good.replace("plus", "and"))
    (rows / "empty.jsonl").write_text("")
    (rows / "odd.jsonl").write_text('{"colour": 1, "size": 2}\n' * 5)
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'[run]\nname = "mixed"\nrounds = 1\n[data]\nsource = "{rows}"\nmax-length = 128\n'
        "[train]\nlocal-steps = 2\n[clients]\nminimum = 2\n[simulation]\nsites = 4\n"
    )
    done = umbel("run", str(recipe), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs/mixed/summary.json").read_text())
    assert summary["site_names"] == ["good-a", "good-b"]
    assert "site empty refused: no_data" in done.stdout
    assert "site odd refused: no_data" in done.stdout
    assert "colour" in done.stdout

    for name in ("good-a", "good-b"):
        (rows / f"{name}.jsonl").unlink()
    failed = umbel("run", str(recipe), "--set", "run.name=none", "--set", "simulation.sites=2", cwd=tmp_path)
    assert failed.returncode == 75, failed.stdout + failed.stderr
    assert "0 of the 2 sites" in failed.stdout
    assert "empty" in failed.stdout
    assert "odd" in failed.stdout
