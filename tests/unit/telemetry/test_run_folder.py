from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import subprocess
import sys

import numpy as np
import pytest

from umbel.errors import DataError
from umbel.telemetry.runfolder import RunFolder, find_run, list_runs, runs_root


def test_the_root_is_read_at_each_call(tmp_path, monkeypatch):
    monkeypatch.delenv("UMBEL_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert runs_root() == tmp_path / "runs"
    monkeypatch.setenv("UMBEL_RUNS", str(tmp_path / "elsewhere"))
    assert runs_root() == tmp_path / "elsewhere"
    assert list_runs() == []


def test_paths_are_absolute_and_survive_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create("runs/a")
    monkeypatch.chdir("/")
    assert run.events_jsonl == tmp_path / "runs" / "a" / "events.jsonl"
    assert run.checkpoints.is_dir()


def test_opening_a_run_to_read_it_writes_nothing(tmp_path):
    RunFolder.create(tmp_path / "a").write_config("x = 1\n")
    before = sorted(p.name for p in (tmp_path / "a").iterdir())
    run = RunFolder.open(tmp_path / "a")
    assert run.events.path == run.events_jsonl
    assert sorted(p.name for p in run.path.iterdir()) == before == ["checkpoints", "config.toml"]


def test_a_folder_without_a_run_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"no run in this folder, got .*events\.jsonl"):
        RunFolder.open(tmp_path)


def test_runs_are_listed_newest_first_and_found_by_name(tmp_path):
    for age, name in enumerate(["old", "new"]):
        RunFolder.create(tmp_path / name).events.write("run_started")
        os.utime(tmp_path / name / "events.jsonl", (1000 + age, 1000 + age))
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").write_text("")
    assert [run.name for run in list_runs(tmp_path)] == ["new", "old"]
    assert find_run("latest", tmp_path).name == "new"
    assert find_run("old", tmp_path).path == find_run(tmp_path / "old").path
    with pytest.raises(DataError, match="no run in this folder, got 'absent'"):
        find_run("absent", tmp_path)
    with pytest.raises(DataError, match="no run yet"):
        find_run("", tmp_path / "nothing")


def test_a_summary_is_whole_or_the_old_one(tmp_path):
    run = RunFolder.create(tmp_path)
    run.write_summary({"loss": np.float32(0.5), "bad": float("nan")})
    assert json.loads(run.summary_json.read_text()) == {"loss": 0.5, "bad": None}

    class Interrupt(dict):
        def items(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.write_summary(Interrupt(a=1))
    assert json.loads(run.summary_json.read_text())["loss"] == 0.5
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_the_environment_names_versions_and_no_person_machine_or_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://someone:hunter2@proxy")
    run = RunFolder.create(tmp_path)
    found = run.write_environment()
    text = run.environment_json.read_text()
    assert json.loads(text) == found
    assert found["python"] == platform.python_version()
    assert found["packages"]["numpy"] == np.__version__
    assert found["num_cpus"] == os.cpu_count()
    assert set(found) == {"python", "packages", "platform", "num_cpus", "memory_bytes", "gpus"}
    assert "hunter2" not in text
    assert f'"{socket.gethostname()}"' not in text
    assert f'"{getpass.getuser()}"' not in text
    assert os.sep not in found["platform"]
    assert str(tmp_path) not in text


def test_importing_what_reads_a_run_loads_no_heavy_library():
    code = (
        "import sys, umbel.telemetry.report, umbel.telemetry.metrics, umbel.cli.show, umbel.cli.watch, umbel.cli.doctor\n"
        "heavy = {'torch', 'transformers', 'flwr', 'rich', 'numpy', 'numba', 'peft', 'datasets'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
