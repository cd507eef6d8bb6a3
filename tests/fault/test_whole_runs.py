"""Whole runs in one process, with the project's own sites: what a fault may change (who counts) and what not (the bits)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Error, Message
from support.inprocess import SITES, commits, crcs, make_session

from server_app.checker import check_run
from umbel.faults import FaultPlan
from umbel.messages import CONTROL_RECORD, TRAIN, Instruction, from_record

pytestmark = pytest.mark.fault


def order_of(message: Message) -> Instruction:
    return from_record(Instruction, message.content[CONTROL_RECORD])


def lost_in(name: str, rounds: tuple[int, ...]):
    """The site does its work and stores its state; the answer never arrives."""

    def wrap(site, answer):
        def handle(kind, message):
            reply = answer(kind, message)
            if site == name and kind == TRAIN and order_of(message).round in rounds:
                return Message(Error(8, "gone"), reply_to=message)
            return reply

        return handle

    return wrap


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert make_session(folder, "telemetry.keep-updates=true").run() == 0
    return folder


def test_f00_the_same_run_twice_in_any_order_of_replies(undisturbed, tmp_path) -> None:
    """F00: every state of every round, bit for bit."""
    session = make_session(tmp_path)
    for delay, site in zip((9.0, 3.0, 6.0), session._grid.sites.values(), strict=True):
        site.delay_seconds = delay
    assert session.run() == 0
    assert crcs(tmp_path) == crcs(undisturbed)
    assert len(set(crcs(tmp_path))) == 4


def test_the_checker_passes_a_good_run_and_finds_what_was_tampered_with(undisturbed, tmp_path) -> None:
    """I1 to I4, I6 and I7: each is violated once by editing a copy of a good run, and found."""
    import shutil

    assert check_run(undisturbed / "run") == []

    def tampered(edit) -> list[str]:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(undisturbed / "run", copy)
        path = copy / "events.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(e) + "\n" for e in edit(events)))
        return sorted({problem[:2] for problem in check_run(copy)})

    def of(events, kind, index):
        return next(e for e in events if e["event"] == kind and e["round"] == index)

    def twice(events):
        of(events, "round_committed", 2)["accepted"].append(of(events, "round_committed", 2)["accepted"][0])
        return events

    def unseen(events):
        return [e for e in events if not (e["event"] == "update_accepted" and e["round"] == 3)]

    def other_state(events):
        of(events, "round_committed", 2)["state_crc"] = "0" * 32
        return events

    def gap(events):
        return [e for e in events if not (e["event"] == "round_committed" and e["round"] == 2)]

    def reused(events):
        at = next(i for i, e in enumerate(events) if e["event"] == "round_opened" and e["round"] == 2)
        return [*events[:at], events[at], *events[at:]]

    def overdue(events):
        of(events, "round_committed", 1)["seconds"]["collect"] = 1e6
        return events

    def leaking(events):
        of(events, "round_committed", 4)["in_flight"] = 99
        return events

    assert tampered(lambda e: e) == []
    assert "I1" in tampered(twice)
    assert tampered(unseen) == ["I2"]
    assert tampered(other_state) == ["I3"]
    assert "I4" in tampered(gap)
    assert tampered(reused) == ["I4"]
    assert tampered(leaking) == ["I6"]
    assert tampered(overdue) == ["I7"]


def cursors(folder: Path, site: str) -> dict[str, dict]:
    """Return the data position of every version a site kept, by name."""
    found = (folder / "state" / site).rglob("v-*/meta.json")
    return {p.parent.name: json.loads(p.read_text())["cursor"] for p in found}


def test_f18_rows_of_a_lost_update_are_trained_on_again_and_none_twice(undisturbed, tmp_path) -> None:
    """F18: the ledger is the cursor of what counted; a lost round moves it no further."""
    assert make_session(tmp_path, wrap=lost_in("kitchen", (2, 3))).run() == 0
    assert [a["site"] for a in commits(tmp_path)[1]["accepted"]] == ["clinic", "workshop"]
    plain, lossy = cursors(undisturbed, "kitchen"), cursors(tmp_path, "kitchen")
    # Rounds 2, 3 and 4 all start from what round 1 left; round 4 is the second that counts.
    assert (
        lossy["v-000002-0001"] == lossy["v-000003-0001"] == lossy["v-000004-0001"] == plain["v-000002-0001"]
    )


def test_f17_a_site_that_missed_rounds_comes_back_where_it_was(tmp_path) -> None:
    """F17: three rounds away; its data position and moments go on from its own last committed update."""
    folder = tmp_path / "away"
    session = make_session(folder, "run.rounds=5", "telemetry.keep-updates=true")

    def fault(point: str, round_index: int) -> None:
        # The third node leaves after round 1 and is back for round 5.
        if point == "after_commit":
            session._grid.sites[3].online = round_index in (4, 5)

    session._fault = fault
    assert session.run() == 0
    sets = [[a["site"] for a in r["accepted"]] for r in commits(folder)]
    assert sets == [list(SITES), *[["clinic", "kitchen"]] * 3, list(SITES)]
    orders = [order_of(m) for m in session._grid.sent if m.metadata.dst_node_id == 3]
    last = next(o for o in orders if o.round == 5)
    assert json.loads(last.settled) == [1, 1]
    assert json.loads(last.directives)["first_step"] == 4 * 2
    assert last.base == commits(folder)[3]["state_crc"]
    assert check_run(folder / "run") == []


def test_f05_a_site_killed_and_restarted_keeps_moments_and_position(undisturbed, tmp_path) -> None:
    """F05, in process: a fresh service (all warm state gone) for every message changes no bit."""
    import client_app.app

    def forget(name, answer):
        def handle(kind, message):
            client_app.app._service = None
            return answer(kind, message)

        return handle

    assert make_session(tmp_path, wrap=forget).run() == 0
    assert crcs(tmp_path) == crcs(undisturbed)


@pytest.mark.parametrize(
    ("point", "do", "kind"),
    [
        ("before_train", "raise", "exception"),
        ("mid_train", "raise", "exception"),
        ("after_train", "nan", "non_finite"),
        ("before_send", "nan", "non_finite"),
    ],
)
def test_f02_f30_f31_faults_inside_a_site_cost_that_update_only(
    tmp_path, monkeypatch, point, do, kind
) -> None:
    """F02, F30, F31: typed, named, the others exact: the same as if the site had not been asked that round."""
    import client_app.app

    runs = {}
    for name in ("planned", "absent"):
        folder = tmp_path / name
        plan = FaultPlan(folder / "fired.jsonl")
        folder.mkdir()
        if name == "planned":
            plan.at("kitchen", round=2, point=point, do=do)
        monkeypatch.setenv("UMBEL_FAULTS", plan.to_json())
        client_app.app._service = None
        wrap = lost_in("kitchen", (2,)) if name == "absent" else (lambda site, answer: answer)
        assert make_session(folder, "run.rounds=3", wrap=wrap).run() == 0
        assert plan.unfired() == []
        runs[name] = crcs(folder)
        if name == "planned":
            rejected = commits(folder)[1]["rejected"]
            assert [(r["site"], r["kind"]) for r in rejected] == [("kitchen", kind)]
    client_app.app._service = None
    assert runs["planned"] == runs["absent"]


def test_f13_a_resume_with_other_settings_is_refused_by_name_and_more_rounds_are_allowed(tmp_path) -> None:
    """F13."""
    assert make_session(tmp_path, "run.rounds=2").run() == 0
    changed = make_session(
        tmp_path, "run.rounds=2", "run.resume=auto", "train.learning-rate=0.5", "run.seed=8"
    )
    assert changed.run() == 78
    assert "run.seed: 7 -> 8" in changed.history.reason
    assert "train.learning-rate: 0.01 -> 0.5" in changed.history.reason
    longer = make_session(tmp_path, "run.rounds=4", "run.resume=auto", "train.schedule=cosine")
    assert longer.run() == 0
    assert [r["round"] for r in commits(tmp_path)] == [1, 2, 3, 4]


def test_f11_the_newest_checkpoint_is_damaged_and_the_run_is_still_exact(undisturbed, tmp_path) -> None:
    """F11: falls back one checkpoint, sites pick the older state, every bit is as undisturbed."""
    first = make_session(tmp_path, "run.rounds=4", fault=stop_after(3))
    with pytest.raises(KeyboardInterrupt):
        first.run()
    newest = max((tmp_path / "run/checkpoints").glob("round-*"))
    data = bytearray((newest / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "state.safetensors").write_bytes(data)
    again = make_session(tmp_path, "run.rounds=4", "run.resume=auto")
    assert again.run() == 0
    assert list((tmp_path / "run/checkpoints").glob("*.corrupt"))
    assert crcs(tmp_path) == crcs(undisturbed)


def stop_after(round_index: int):
    def fault(point: str, index: int) -> None:
        if (point, index) == ("after_checkpoint", round_index):
            raise KeyboardInterrupt

    return fault


def test_checkpoints_every_third_round_run_the_rounds_between_again_and_exactly(
    undisturbed, tmp_path
) -> None:
    """With n > 1 a kill costs up to n rounds of time, no bit: sites keep as many versions as that takes."""

    def fault(point: str, index: int) -> None:
        if (point, index) == ("dispatch", 4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_session(tmp_path, "run.checkpoint-every=2", fault=fault).run()
    # Rounds 3 is committed and not in a checkpoint.
    assert make_session(tmp_path, "run.checkpoint-every=2", "run.resume=auto").run() == 0
    assert crcs(tmp_path) == crcs(undisturbed)
    attempts = [(r["round"], r["attempt"]) for r in commits(tmp_path)]
    assert attempts == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert check_run(tmp_path / "run") == []
