"""R8: `umbel site` beside a stock SuperNode: the same federation, no process for a message, nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support.federation import Federation
from support.resident_site import until

from client_app.resident import progress
from client_app.resident.processes import Process, alive
from umbel.cli.flower import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.federation
@pytest.mark.timeout(400)
def test_r8_a_site_without_processes_serves_a_federation_with_a_stock_one(tmp_path) -> None:
    federation = Federation(tmp_path, {"kitchen": "demo:kitchen"})
    federation.env.pop("XDG_RUNTIME_DIR", None)
    with federation as f:
        command = [sys.executable, "-m", "umbel.cli.main", "site", "start", "--insecure"]
        command += ["--superlink", f"127.0.0.1:{f.port}", "--port", str(free_port()), "--node-config"]
        command.append(f'name="clinic" data="demo:clinic" state-dir="{f.state / "clinic"}"')
        site = f.spawn("clinic", command, PYTHONPATH=str(ROOT))
        run_id = f.start(
            "run.rounds=2",
            "clients.minimum=2",
            "train.local-steps=1",
            "train.threads=1",
            "data.max-length=128",
            "eval.every=0",
            f"run.output-dir={tmp_path / 'run'}",
        )
        assert f.wait(run_id, seconds=300) == "finished:completed"
        logs = {
            name: (f.logs / f"{name}.log").read_text("utf-8", "replace") for name in ("clinic", "kitchen")
        }
        assert "Start `flwr-clientapp` process" in logs["kitchen"]
        assert "flwr-clientapp" not in logs["clinic"]
        assert "stock flower-supernode is used instead" not in logs["clinic"]
        (path,) = (f.state / "clinic/.resident").glob("*.json")
        facts = progress.read(path)
        assert facts["served"] >= 3
        worker = Process(facts["pid"], facts["start"])
        os.killpg(site.pid, signal.SIGKILL)
        until(lambda: not alive(worker), "the worker leaves with its SuperNode")
        assert list((f.state / "clinic").rglob("*.sock")) == []
