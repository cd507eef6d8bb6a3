"""Pretraining between real processes: killed in the middle, resumed, and the simulation's very hash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.federation import Federation

from umbel.faults import SERVER, FaultPlan

SETTINGS = [
    "run.task=pretrain",
    "run.rounds=3",
    "run.seed=7",
    "model.name=config:gpt2-tiny",
    "data.max-length=64",
    "data.heldout-max=4",
    "clients.minimum=2",
    "train.mode=full",
    "train.local-steps=4",
    "train.batch-size=4",
    "train.learning-rate=0.003",
    "train.optimizer-state=keep",
    "train.threads=1",
    "server.optimizer=nesterov",
    "server.learning-rate=0.7",
    "compression.up=int8(256,rtn)",
]


def crcs(folder: Path) -> list[str]:
    last = {}
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "round_committed" and event["outcome"] == "commit":
            last[event["round"]] = event["state_crc"]
    return [last[r] for r in sorted(last)]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Path:
    """The run folder of an uninterrupted simulation of two sites."""
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "r.toml").write_text('[run]\nname = "r"\n[simulation]\nsites = 2\n')
    sets = [x for s in [*SETTINGS, f"run.output-dir={folder / 'run'}"] for x in ("--set", s)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "UMBEL_STATE": str(folder / "state")}
    command = [sys.executable, "-m", "umbel.cli.main", "run", str(folder / "r.toml"), *sets]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=480, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run"


def test_a_simulation_trains_from_scratch_and_exports_a_model(simulated) -> None:
    summary = json.loads((simulated / "summary.json").read_text())
    assert (summary["rounds"], summary["sites"], summary["outcome"]) == (3, 2, "completed")
    assert summary["final_eval_loss"] < summary["initial_eval_loss"] - 0.2
    assert {p.name for p in (simulated / "model").iterdir()} >= {
        "model.safetensors",
        "tokenizer.json",
        "config.json",
    }


@pytest.mark.federation
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_federation_killed_and_resumed_ends_with_the_simulations_hash(simulated, tmp_path) -> None:
    """Evidence 4: a site dies by SIGKILL in round 2, the server in the checkpoint of that round; then it is resumed."""
    plan = FaultPlan(tmp_path / "fired.jsonl")
    plan.at("clinic", round=2, point="mid_train", do="kill")
    plan.at(SERVER, round=2, point="in_checkpoint", do="kill")
    settings = [*SETTINGS, f"run.output-dir={tmp_path / 'run'}", "clients.quorum=2"]
    sites = {"clinic": "demo:clinic", "kitchen": "demo:kitchen"}
    with Federation(tmp_path, sites, isolated=True, env={"UMBEL_FAULTS": plan.to_json()}) as federation:
        federation.start(*settings)
        deadline = time.monotonic() + 400
        while plan.unfired() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert plan.unfired() == [], federation.log("superexec")
        status = federation.wait(federation.start(*settings, "run.resume=auto"), seconds=400)
        assert status == "finished:completed", (tmp_path / "run/server.log").read_text()[-3000:]
    assert crcs(tmp_path / "run") == crcs(simulated)
