"""Attacks on the model and on privacy, on real sites in one process: `make chaos`, or UMBEL_NIGHTLY=1.

The scripts under `benchmarks/attacks` do the work and print JSON; here their stated bounds are held.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.nightly, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]


def printed(module: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.attacks.{module}", "--json", *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=2300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_f36_hostile_sites_within_the_bound_cost_little_and_beyond_it_are_an_error() -> None:
    """F36: sign flip, ALIE, IPM and label flip, two of seven; every robust rule keeps its loss, the mean does not."""
    found = printed("robustness")
    assert all(found["kept"].values()), found["worst_relative_rise"]
    assert all(found["refused_below_bound"].values())
    mean = {r["attack"]: r["relative_rise"] for r in found["runs"] if r["rule"] == "mean" and r["liars"]}
    assert max(mean.values()) > 2 * max(found["within"].values())


def test_f37_a_scaled_back_door_is_reported_and_held_off() -> None:
    """F37: it opens without a defence (so the test can fail), and with each one it stays below the target."""
    found = printed("backdoor")
    assert found["scaled"]["none"]["success_after_attack"] > 0.5
    assert all(found["kept"].values()), found["scaled"]
    assert set(found["stealthy"]) == set(found["scaled"])


def test_f44_what_leaks_is_gauged_and_falls_with_every_measure() -> None:
    """F44: everything leaks from one plain step of a full model; sums and noise leave the attacker less."""
    found = printed("inversion")
    full = {arm: value["area"] for arm, value in found["full"].items()}
    assert full["plain"] > 0.99
    assert full["sum-of-8"] < full["plain"]
    assert full["clip-noise"] < 0.75
    assert found["lora"]["clip-noise"]["area"] < 0.65
