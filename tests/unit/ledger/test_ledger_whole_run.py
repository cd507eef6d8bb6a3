"""The ledger over a real run in one process: signed at the sites, checked at the server, verified from files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.inprocess import make_session

from client_app.inspect import describe, render, sent_files
from server_app.leave_one_out import check, kept_rounds, leave_one_out, without
from server_app.start import prepare
from strategies import build
from umbel import checkpoints
from umbel.config import resolve
from umbel.errors import ConfigError
from umbel.ledger import keys
from umbel.ledger.contributions import contributions
from umbel.ledger.verify import verify
from umbel.messages import CONTROL_RECORD, TRAIN, Reply, from_record, to_record
from umbel.telemetry.events import read_events
from umbel.telemetry.history import History
from umbel.telemetry.report import write_report

FEW = (
    "run.rounds=2",
    "telemetry.keep-updates=true",
    "telemetry.sinks=none",
    "data.limit=12",
    "train.local-steps=1",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of three sites and two rounds; the kitchen's round 2 is spoilt on the way and refused."""
    folder = tmp_path_factory.mktemp("whole")

    def wrap(name, answer):
        def spoil(kind, message):
            reply = answer(kind, message)
            control = from_record(Reply, reply.content[CONTROL_RECORD])
            if name == "kitchen" and kind == TRAIN and control.round == 2:
                claimed = dataclasses.replace(control, tokens=control.tokens + 5)
                reply.content[CONTROL_RECORD] = to_record(claimed)
            return reply

        return spoil if name == "kitchen" else answer

    assert make_session(folder, *FEW, wrap=wrap).run() == 0
    return folder


def test_every_accepted_update_is_signed_and_the_ledger_holds(run) -> None:
    found = verify(run / "run")
    assert (found.broken, found.rounds, found.entries, found.signed, found.kept) == ("", 2, 5, 5, 5)
    made = {
        n: keys.public_hex(keys.load(run / "state" / n / f"{n}.key.pem"))
        for n in ("clinic", "kitchen", "workshop")
    }
    assert found.keys == made
    joined = {
        e["site"]: e["key"] for e in read_events(run / "run" / "events.jsonl") if e["event"] == "site_joined"
    }
    assert joined == made


def test_an_update_that_is_not_what_the_site_signed_is_refused_and_named(run) -> None:
    (refused,) = [e for e in read_events(run / "run" / "events.jsonl") if e["event"] == "update_rejected"]
    assert (refused["round"], refused["site"], refused["kind"]) == (2, "kitchen", "manifest")
    assert refused["reason"].startswith("the site signed tokens = ")


def test_contributions_add_up(run) -> None:
    rows = {r["site"]: r for r in contributions(run / "run")}
    assert {s: (r["rounds"], r["signed"], r["steps"]) for s, r in rows.items()} == {
        "clinic": (2, 2, 2),
        "kitchen": (1, 1, 1),
        "workshop": (2, 2, 2),
    }
    assert sum(r["share"] for r in rows.values()) == pytest.approx(1.0)
    history = History.read(run / "run" / "events.jsonl")
    assert sum(r["tokens"] for r in rows.values()) == history.tokens() > 0
    assert sum(r["bytes_up"] for r in rows.values()) == history.bytes_up()


def test_what_left_the_site_is_what_arrived(run) -> None:
    """The site's own record names the same bytes as the server's ledger, tensor by tensor readable."""
    (path,) = sent_files(run / "state" / "clinic")
    found = describe(path)
    assert found["broken"] == ""
    updates = [a for a in found["answers"] if a["kind"] == TRAIN]
    signed = [
        entry["manifest"]["frame"]
        for line in (run / "run" / "ledger.jsonl").read_text().splitlines()
        for entry in json.loads(line)["entries"]
        if entry["site"] == "clinic"
    ]
    assert [a["frame"] for a in updates] == signed
    last = found["last_update"]
    assert last["frame"] == signed[-1]
    assert sum(t["bytes"] for t in last["tensors"]) <= last["bytes"]
    names = {t["name"].rpartition(".lora_")[2] for t in last["tensors"]}
    assert names == {"A.weight", "B.weight"}
    text = render(found, last=9)
    assert last["tensors"][0]["name"] in text
    assert "metrics: " in text
    path.write_text(path.read_text().replace('"tokens":', '"token":', 1))
    assert describe(path)["broken"].startswith("sent.jsonl line ")


def test_leaving_a_site_out_is_computed_from_the_kept_updates(run, tmp_path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run / "run", folder)
    config = resolve(folder / "config.toml")
    start = prepare(config)
    rounds = kept_rounds(folder, start)
    whole = without("", build(config, start.layout, start.scales), dict(start.state), rounds)
    committed = checkpoints.load_newest(folder / "checkpoints").state
    for name, value in committed.items():
        np.testing.assert_allclose(whole[name], value, atol=1e-6)
    # Left out by hand, in the first round: the mean of the other two, weighted by tokens.
    first = without("clinic", build(config, start.layout, start.scales), dict(start.state), rounds[:1])
    others = [u for u in rounds[0][1] if u.site != "clinic"]
    name = next(n for n in first if n.endswith("lora_B.weight"))
    by_hand = sum(u.weight * u.arrays[name].astype(np.float64) for u in others) / sum(
        u.weight for u in others
    )
    np.testing.assert_allclose(first[name], by_hand, atol=1e-7)
    rows = tmp_path / "heldout.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"What is {i}?", "completion": f" a number {i}"}) + "\n" for i in range(6)
        )
    )
    found = leave_one_out(folder, str(rows))
    assert set(found["sites"]) == {"clinic", "kitchen", "workshop"}
    assert found["rows"] == 6
    assert len({round(v, 9) for v in found["sites"].values()}) == 3
    (folder / "leave_one_out.json").write_text(json.dumps(found))
    assert {r["site"]: r["loss_change"] for r in contributions(folder)} == found["sites"]
    assert f"{found['sites']['clinic']:+.4f}" in write_report(folder).read_text()


def test_leave_one_out_refuses_what_has_no_answer() -> None:
    with pytest.raises(ConfigError, match="fedavg or fedit"):
        check(resolve(None, ["run.method=carry"]), "x.jsonl")
    with pytest.raises(ConfigError, match="--data rows.jsonl"):
        check(resolve(None, []), "")


def test_a_resumed_run_has_one_ledger_that_holds(tmp_path) -> None:
    """The server is killed after the second commit and before its record; the third life writes what is missing."""

    class Killed(BaseException):
        pass

    def fault(point: str, round_index: int) -> None:
        if (point, round_index) == ("after_checkpoint", 2):
            raise Killed

    short = (
        "run.rounds=3",
        "clients.minimum=2",
        "telemetry.sinks=none",
        "data.limit=12",
        "train.local-steps=1",
    )
    with pytest.raises(Killed):
        make_session(tmp_path, *short, sites=("clinic", "kitchen"), fault=fault).run()
    assert make_session(tmp_path, *short, "run.resume=auto", sites=("clinic", "kitchen")).run() == 0
    found = verify(tmp_path / "run")
    assert (found.broken, found.rounds, found.signed) == ("", 3, 6)
