"""F10: kill -9 of the server at each of its six fault points, then resume: the states of the undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from umbel.faults import SERVER_POINTS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def points() -> dict[str, dict]:
    """One life a fork, so that the libraries are loaded once."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recovery", "--json", "--fork"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    return {p["point"]: p for p in json.loads(done.stdout.splitlines()[-1])["points"]}


@pytest.mark.parametrize("point", SERVER_POINTS)
def test_f10_a_killed_server_resumes_exactly(points, point) -> None:
    """F10: the plan fired, all states are equal bit for bit, the offline checker recomputes every one of them."""
    found = points[point]
    assert found["killed"]
    assert found["state_hash_equal"]
    assert found["checker"] == []
    assert found["seconds_to_dispatch"] > 0
