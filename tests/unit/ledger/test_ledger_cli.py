"""`umbel ledger` and `umbel inspect`: tables, exit codes, JSON keys."""

from __future__ import annotations

import json

import pytest
from support.ledgers import SignedRun

from client_app import inspect as site_inspect
from client_app.sent import Outbox
from umbel.cli.ledger import show_ledger, verify_ledger


@pytest.fixture
def run(tmp_path) -> SignedRun:
    run = SignedRun(tmp_path / "run", tmp_path / "keys")
    run.round(1)
    run.round(2)
    return run


def test_verify_says_what_it_checked_and_ends_with_0_or_names_the_break_and_ends_with_1(run, capsys) -> None:
    assert verify_ledger(run.folder) == 0
    said = capsys.readouterr().out
    assert "holds: 2 rounds, 4 updates, 4 of them signed by 2 sites, 4 compared with the kept bytes" in said
    text = run.book.path.read_text()
    run.book.path.write_text(text.replace('"steps":5', '"steps":6', 1))
    assert verify_ledger(run.folder) == 1
    assert capsys.readouterr().out.startswith("BROKEN: ledger.jsonl line 1 was changed")
    assert verify_ledger(run.folder, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["broken"][:19]) == (False, "ledger.jsonl line 1")


def test_the_table_has_a_line_a_site(run, capsys) -> None:
    run.event(event="run_started", run="r")
    for site in ("clinic", "kitchen"):
        run.event(event="update_accepted", round=1, attempt=1, site=site, bytes=8, tokens=100)
    assert show_ledger(run.folder) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[2:]] == ["clinic", "kitchen"]
    assert show_ledger(run.folder, as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)["sites"]
    assert {r["site"]: (r["rounds"], r["signed"], r["steps"]) for r in rows} == {
        "clinic": (2, 2, 10),
        "kitchen": (2, 2, 10),
    }
    assert set(rows[0]) == {
        "site", "rounds", "steps", "tokens", "share", "bytes_up", "bytes_down", "signed", "key", "loss_change",
    }  # fmt: skip


def test_inspect_of_nothing_is_an_error_and_a_touched_audit_log_is_one(tmp_path, capsys) -> None:
    assert site_inspect.main([str(tmp_path)]) == 65
    outbox = Outbox(tmp_path, "clinic")
    outbox.note("refused", run="r", reason="run.task = 'x' is not among run.tasks\x1b[2J")
    outbox.note("refused", run="r", reason="again")
    capsys.readouterr()
    assert site_inspect.main([str(tmp_path), "--audit"]) == 0
    said = capsys.readouterr().out
    assert "is not among run.tasks" in said
    assert "\x1b" not in said
    outbox.audit.write_text(outbox.audit.read_text().replace("again", "never"))
    assert site_inspect.main([str(tmp_path), "--audit", "--site", "clinic"]) == 1
    assert "THE LOG WAS TOUCHED: clinic.audit.jsonl line 2" in capsys.readouterr().out
