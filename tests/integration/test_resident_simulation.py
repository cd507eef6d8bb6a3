"""R9: in a simulation the actors are the workers: a base model a process, and one instruction a site at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.resident_site import order, settings, start_state

from client_app.service import Service
from client_app.state import SiteState
from umbel.messages import TRAIN


@pytest.mark.timeout(300)
def test_r9_four_sites_on_two_actors_load_the_base_at_most_twice(tmp_path) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "UMBEL_STATE": str(tmp_path / "state")}
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[run]\nname = "r"\nrounds = 2\n[train]\nlocal-steps = 1\nthreads = 1\n[data]\nmax-length = 128\n'
        f"[simulation]\nsites = 4\ncpus-per-site = {max(1, (os.cpu_count() or 2) // 2)}\n"
    )
    command = [
        sys.executable,
        "-m",
        "umbel.cli.main",
        "run",
        str(recipe),
        "--set",
        f"run.output-dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(loads(tmp_path / "run/events.jsonl")) <= 2


def loads(path) -> list[float]:
    """Return the seconds of every load of a base model that any event of the run tells of."""
    found: list[float] = []

    def walk(value) -> None:
        if isinstance(value, dict):
            seconds = value.get("seconds")
            if isinstance(seconds, dict) and seconds.get("load"):
                found.append(seconds["load"])
            for item in value.values():
                walk(item)

    for line in path.read_text().splitlines():
        walk(json.loads(line))
    return found


def test_r9_a_second_message_of_one_site_at_the_same_time_fails_loudly(tmp_path) -> None:
    config = settings("train.local-steps=1")
    node = {"name": "clinic", "data": "demo:clinic", "state-dir": str(tmp_path)}
    with SiteState(tmp_path, "r", "clinic").exclusive():
        reply, frame = Service().handle(
            TRAIN, *order(config, start_state(config), 1), node_config=node, node_id=1
        )
    assert (reply.status, frame) == ("refused", None)
    assert "another instruction of this run is being worked on" in reply.reason
