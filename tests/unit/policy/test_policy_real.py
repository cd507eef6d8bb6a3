"""The door on real processes: `umbel site start` lets the allowed bundle train and refuses another one before it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.federation import Federation

from client_app.sent import Outbox
from umbel.cli.flower import free_port
from umbel.cli.inspect import bundle_hash
from umbel.ledger import chain
from umbel.ledger.verify import verify

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.federation,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not os.environ.get("UMBEL_NIGHTLY"), reason="real processes, a minute: UMBEL_NIGHTLY=1"
    ),
]


def test_f50_a_bundle_that_is_not_allowed_never_runs_and_the_allowed_one_trains(tmp_path) -> None:
    """F50: the site's installed code compares the whole hash; the refusal is in the events and in the audit log."""
    federation = Federation(tmp_path, {})
    federation.env.pop("XDG_RUNTIME_DIR", None)
    good = bundle_hash(federation.app)
    with federation as f:
        for name, allowed in (("clinic", good), ("kitchen", good), ("workshop", "00" * 32)):
            policy = tmp_path / f"{name}.toml"
            policy.write_text(
                f'[bundle]\nhashes = ["{allowed}"]\n[run]\nmin-sites = 2\nmax-seconds-a-round = 60\n'
            )
            command = [sys.executable, "-m", "umbel.cli.main", "site", "start", "--insecure"]
            command += ["--superlink", f"127.0.0.1:{f.port}", "--port", str(free_port()), "--node-config"]
            state = f.state / name
            command.append(f'name="{name}" data="demo:{name}" state-dir="{state}" policy="{policy}"')
            f.spawn(name, command, PYTHONPATH=str(ROOT))
        run_id = f.start(
            "run.rounds=1",
            "clients.minimum=2",
            "clients.quorum=2",
            "train.local-steps=1",
            "train.threads=1",
            "data.max-length=128",
            "eval.every=0",
            "telemetry.sinks=none",
            f"run.output-dir={tmp_path / 'run'}",
        )
        assert f.wait(run_id, seconds=300) == "finished:completed"
        events = f.events()
    refused = [e for e in events if e["event"] == "site_refused"]
    assert {e["site"] for e in refused} == {"workshop"}
    assert "is not among bundle.hashes" in refused[0]["reason"]
    assert not list((f.state / "workshop").glob(".resident/*.out")), (
        "a worker of the refused bundle was started"
    )
    (line,) = {r["reason"] for r in chain.records(Outbox(f.state / "workshop", "workshop").audit)}
    assert good[:16] in line
    admitted = chain.records(Outbox(f.state / "clinic", "clinic").audit)
    assert [r["event"] for r in admitted][:1] == ["run_admitted"]
    assert admitted[0]["bundle"] == good
    found = verify(tmp_path / "run")
    assert (found.broken, found.signed) == ("", 2)
