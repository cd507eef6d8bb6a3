"""The resident worker under the stock `flower-supernode`: what is imported, loaded, logged and left behind."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from support.federation import Federation
from support.resident_site import until

from client_app.resident import progress
from client_app.resident.processes import Process, alive

ROUNDS = 2
CANARY = "Xylophonquartz"


def rows(path: Path) -> str:
    path.write_text(
        "".join(
            json.dumps({"question": f"{CANARY} {i} plus 1?", "answer": f"It is {i + 1}."}) + "\n"
            for i in range(40)
        )
    )
    return str(path)


def logs(state: Path) -> str:
    return "".join(p.read_text() for p in (state / ".resident").glob("*.log"))


def imported(log: str, module: str) -> int:
    """Return how many processes imported `module`, by the interpreter's own account in their stderr."""
    return len(re.findall(rf"^import time:.*\| +{re.escape(module)}$", log, re.MULTILINE))


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_r1_r7_thin_processes_one_load_logs_without_data_and_no_orphan(tmp_path, monkeypatch) -> None:
    """R1, R7: two rounds; one site keeps its worker, the other lets it go after each message (`idle-s=0`)."""
    sites = {name: rows(tmp_path / f"{name}.jsonl") for name in ("warm", "cold")}
    federation = Federation(tmp_path, {})
    federation.env.pop("XDG_RUNTIME_DIR", None)
    federation.env["PYTHONPROFILEIMPORTTIME"] = "1"
    with federation as f:
        f.start_site("warm", data=sites["warm"])
        f.start_site("cold", data=sites["cold"], **{"idle-s": "0"})
        run_id = f.start(
            f"run.rounds={ROUNDS}",
            "clients.minimum=2",
            "train.local-steps=2",
            "train.threads=1",
            "data.max-length=128",
            "eval.every=0",
            # Every message is one with work, so that processes and loads can be counted against each other.
            "clients.follow-up=false",
            f"run.output-dir={tmp_path / 'run'}",
        )
        assert f.wait(run_id, seconds=300) == "finished:completed"
        seen = {name: (f.logs / f"{name}.log").read_text("utf-8", "replace") for name in sites}
        own = {name: logs(f.state / name) for name in sites}
        messages = {name: imported(seen[name], "client_app.resident.client") for name in sites}
        for name in sites:
            assert messages[name] >= ROUNDS + 1, name
            for heavy in ("torch", "transformers", "peft", "compression", "numba"):
                assert imported(seen[name], heavy) == 0, (name, heavy)
            # Our lines reach the SuperNode's log, rows reach no log at all.
            assert "rows of site" in seen[name], name
            assert CANARY not in seen[name] + own[name], name
        assert CANARY not in (f.logs / "superlink.log").read_text("utf-8", "replace")
        assert own["warm"].count("loaded in") == 1
        assert own["cold"].count("loaded in") == messages["cold"]
        (path,) = (f.state / "warm/.resident").glob("*.json")
        facts = progress.read(path)
        worker = Process(facts["pid"], facts["start"])
        assert alive(worker)
        os.killpg(f.processes["warm"].pid, signal.SIGKILL)
        until(lambda: not alive(worker), "the worker leaves with its SuperNode")
        left = [p.name for name in sites for p in (f.state / name).rglob("*.sock")]
        assert left == []
