"""Long scenarios with real processes: `make chaos`, or UMBEL_NIGHTLY=1 pytest tests/fault/test_nightly_real.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.federation import CONNECTION, Federation
from support.inprocess import crcs, make_session

from server_app.checker import check_run, commits
from umbel.checkpoints import load_newest
from umbel.config import resolve, to_toml
from umbel.telemetry.events import read_events

pytestmark = [pytest.mark.fault, pytest.mark.federation, pytest.mark.nightly, pytest.mark.timeout(1200)]

SITES = {"clinic": "demo:clinic", "kitchen": "demo:kitchen"}
SETTINGS = [
    "run.seed=7",
    "clients.minimum=2",
    "clients.quorum=2",
    "clients.deadline-seconds=90",
    "clients.grace-seconds=60",
    "train.local-steps=2",
    "train.batch-size=2",
    "train.optimizer-state=keep",
    "train.threads=1",
    "data.max-length=64",
    "data.limit=12",
    "eval.every=0",
    "eval.final=false",
    "telemetry.report=false",
    "telemetry.keep-updates=true",
]


def reference(folder: Path, rounds: int) -> list[str]:
    assert make_session(folder, *SETTINGS, f"run.rounds={rounds}", sites=tuple(SITES)).run() == 0
    return crcs(folder)


def test_f06_all_nodes_gone_ends_with_the_reason_and_a_good_checkpoint(tmp_path) -> None:
    """F06: exit code 75, the reason in words, the last state kept."""
    with Federation(tmp_path, SITES) as f:
        settings = [
            *SETTINGS,
            "run.rounds=50",
            "clients.start-timeout-seconds=20",
            "run.max-consecutive-skips=9",
        ]
        run_id = f.start(*settings, f"run.output-dir={tmp_path / 'run'}")
        f.until(lambda e: e["event"] == "round_opened" and e["round"] == 3, seconds=300)
        for name in SITES:
            f.kill(name)
        assert f.wait(run_id, seconds=400) == "finished:failed"
        end = f.events()[-1]
    assert (end["event"], end["exit_code"]) == ("run_finished", 75)
    assert "sites that a quorum needs are online" in end["reason"]
    assert load_newest(tmp_path / "run/checkpoints").round == len(commits(f.events()))


def test_f05_a_killed_node_comes_back_by_itself_with_its_state(tmp_path) -> None:
    """F05: restarted after 2 s; refused while its old node still counts as online, then taken back."""
    with Federation(tmp_path, SITES) as f:
        run_id = f.start(
            *SETTINGS,
            "run.rounds=14",
            "clients.quorum=1",
            "clients.grace-seconds=6",
            f"run.output-dir={tmp_path / 'run'}",
        )
        f.until(lambda e: e["event"] == "round_opened" and e["round"] == 3, seconds=300)
        f.kill("kitchen")
        time.sleep(2.0)
        f.start_site("kitchen")
        assert f.wait(run_id, seconds=600) == "finished:completed"
        events = f.events()
    joins = [e for e in events if e["event"] == "site_joined" and e["site"] == "kitchen"]
    assert len(joins) == 2
    assert joins[0]["node"] != joins[1]["node"]
    after = [
        e
        for e in events
        if e["event"] == "update_accepted" and e["site"] == "kitchen" and e["t"] > joins[1]["t"]
    ]
    assert after[0]["state_found"] is True
    assert check_run(tmp_path / "run") == []


def test_f15_a_long_superlink_outage_is_mended_by_the_supervisor(tmp_path) -> None:
    """F15: down for 120 s; `umbel run --supervise` starts the run again from its checkpoint; exact."""
    want = reference(tmp_path / "reference", 6)
    with Federation(tmp_path, SITES, isolated=True) as f:
        recipe = tmp_path / "supervised.toml"
        recipe.write_text(
            to_toml(resolve(None, [*SETTINGS, "run.rounds=6", f"run.output-dir={tmp_path / 'run'}"]))
        )
        command = [sys.executable, "-m", "umbel.cli.main", "run", str(recipe), "--federation", CONNECTION]
        supervisor = subprocess.Popen(
            [*command, "--supervise", "8"],
            env=f.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        f.until(lambda e: e["event"] == "dispatched" and e["round"] == 3, seconds=300)
        f.kill("superlink", signal.SIGKILL)
        time.sleep(120.0)
        f.start_superlink()
        said, _ = supervisor.communicate(timeout=700)
    assert supervisor.returncode == 0, said[-3000:]
    assert "restart 1 of 8" in said
    assert crcs(tmp_path) == want


def test_f15_sites_end_their_work_soon_after_a_run_is_stopped(tmp_path) -> None:
    """F15: `flwr stop` in mid round; the server's last event says so and no ClientApp is left after 15 s."""
    import psutil

    with Federation(tmp_path, SITES) as f:
        run_id = f.start(*SETTINGS, "run.rounds=50", f"run.output-dir={tmp_path / 'run'}")
        f.until(lambda e: e["event"] == "dispatched" and e["round"] == 2, seconds=300)
        f.stop(run_id)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and f.events()[-1]["event"] != "run_finished":
            time.sleep(0.5)
        time.sleep(15.0)
        left = [
            " ".join(p.cmdline())
            for name in SITES
            for p in psutil.Process(f.processes[name].pid).children(recursive=True)
            if "flwr-clientapp" in " ".join(p.cmdline())
        ]
    assert left == []


@pytest.mark.parametrize("skew", ["+10m", "-10m"])
def test_f19_a_clock_that_is_wrong_changes_no_deadline(tmp_path, skew) -> None:
    """F19: the site counts seconds on its own monotonic clock; needs the faketime command."""
    import shutil

    if shutil.which("faketime") is None:
        pytest.skip("the faketime command is not installed")
    with Federation(tmp_path, {"clinic": "demo:clinic"}) as f:
        f.sites = SITES
        plain, f.spawn = f.spawn, None
        f.spawn = lambda name, command, **env: plain(name, ["faketime", "-f", skew, *command], **env)
        f.start_site("kitchen")
        f.spawn = plain
        run_id = f.start(*SETTINGS, "run.rounds=2", f"run.output-dir={tmp_path / 'run'}")
        assert f.wait(run_id, seconds=400) == "finished:completed"
    assert all(len(r["accepted"]) == 2 for r in commits(read_events(tmp_path / "run/events.jsonl")))


def test_f10_fifty_kills_at_every_point() -> None:
    """F10: repeated; each resume is exact."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recovery", "--json", "--fork", "--repeat", "50"],
        cwd=root,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
