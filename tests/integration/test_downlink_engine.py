"""The lossy way down through the whole engine: all sites hold the server's shadow, whatever they missed.

Real Session, real sites, virtual time (table row 12; pretrain sections 5 and 13: a gap is refused, a snapshot taken).
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from support.inprocess import commits, crcs, make_session

from client_app.held import Held
from compression.downlink import digest_of
from server_app.byte_plan import BytePlan
from umbel.digest import state_crc
from umbel.errors import ConfigError
from umbel.messages import TRAIN

DOWN = "compression.down=int4(64,rtn);min=64"
TWO = ("clinic", "kitchen")
SMALL = (
    "clients.minimum=2",
    "data.limit=8",
    "data.max-length=64",
    "train.local-steps=1",
    "run.rounds=3",
    "clients.min-deadline-seconds=1",
    DOWN,
)


def held_by(folder, session, name):
    """The models a site has on disk, by digest, oldest first."""
    found = Held(folder / "state" / name / session.run_id / name)
    return {d: found.load(d, session.start.layout) for d in found.digests()}


def run(folder, *overrides, **options):
    session = make_session(folder, *SMALL, *overrides, sites=TWO, **options)
    code = session.run()
    return session, code


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_every_site_holds_the_shadow_and_bytes_shrink(tmp_path, mode):
    settings = [f"train.mode={mode}", "train.optimizer-state=reset"]
    if mode == "full":
        settings += ["server.optimizer=nesterov", "server.learning-rate=0.7", "server.momentum=0.5"]
    session, code = run(tmp_path, *settings)
    assert code == 0, session.history.reason
    link = session.engine.ctx.broadcast
    for name in TWO:
        models = held_by(tmp_path, session, name)
        # The last message was the final evaluation, of the newest version.
        newest = list(models)[-1]
        assert newest == link.digest == digest_of(link.shadow, session.start.layout)
        assert state_crc(models[newest]) == state_crc(link.shadow)
    records = commits(tmp_path)
    assert [r["downlink"]["version"] for r in records] == [1, 2, 3]
    assert len({r["downlink"]["chain"] for r in records}) == 3
    # Frames are an eighth of fp32 and a bit; in mode "full" the first message is empty too: every site has the start.
    exact = sum(e.num_bytes for e in session.start.layout.entries)
    later = records[1]["bytes_down"] / len(TWO)
    assert later < 0.2 * exact
    if mode == "full":
        assert records[0]["bytes_down"] == len(TWO)
    planned = BytePlan(session.config, TWO).rounds()
    for record in records[1:]:
        assert record["bytes_down"] == sum(planned[record["round"] - 1]["down"].values())
    gap = max(float(np.abs(session.engine.state[n] - link.shadow[n]).max()) for n in link.shadow)
    assert 0 < gap < 0.05


LEAN = (
    "train.mode=full",
    "compression.up=int4(64,rtn);min=64",
    "compression.feedback=1",
    "server.optimizer=nesterov",
    "server.learning-rate=0.7",
    "server.momentum=0.5",
)


@pytest.mark.parametrize(
    ("point", "settings"), [("in_checkpoint", ()), ("after_commit", LEAN), ("after_checkpoint", LEAN)]
)
def test_a_killed_server_goes_on_with_the_same_bits(tmp_path, point, settings):
    """Shadow, frames, momentum and the sites' residuals are all where they were; LEAN merges straight from frames."""

    class Killed(BaseException):
        pass

    def fault(where, round_index):
        if (where, round_index) == (point, 2) and not fired:
            fired.append(where)
            raise Killed

    fired: list[str] = []
    whole, code = run(tmp_path / "whole", "eval.final=false", *settings)
    assert code == 0, whole.history.reason
    first = make_session(tmp_path / "cut", *SMALL, "eval.final=false", *settings, sites=TWO, fault=fault)
    with pytest.raises(Killed):
        first.run()
    assert fired
    second, code = run(tmp_path / "cut", "run.resume=auto", "eval.final=false", *settings)
    assert code == 0, second.history.reason
    assert crcs(tmp_path / "cut") == crcs(tmp_path / "whole")
    assert [r["downlink"]["chain"] for r in commits(tmp_path / "cut")] == [
        r["downlink"]["chain"] for r in commits(tmp_path / "whole")
    ]
    assert second.engine.ctx.broadcast.digest == whole.engine.ctx.broadcast.digest


def faulty(site, rounds, act):
    """Wrap one site: `act(kind, message, answer)` in place of its answer in these train rounds."""

    def wrap(name, answer):
        seen = [0]

        def handle(kind, message):
            if kind == TRAIN and name == site:
                seen[0] += 1
                if seen[0] in rounds:
                    return act(kind, message, answer)
            return answer(kind, message)

        return handle

    return wrap


def test_a_site_that_missed_rounds_replays_the_frames_it_lacks(tmp_path):
    """It answers twice with nothing, nor reads what it is sent, and is left to rest; then it gets all frames at once."""
    wrap = faulty("kitchen", (2, 3), lambda kind, message, answer: None)
    session, code = run(
        tmp_path,
        "run.rounds=9",
        "clients.quorum=1",
        "clients.deadline-seconds=10",
        "clients.grace-seconds=1",
        wrap=wrap,
    )
    assert code == 0, session.history.reason
    records = commits(tmp_path)
    absent = [r["round"] for r in records if "kitchen" not in [a["site"] for a in r["accepted"]]]
    assert len(absent) >= 2
    assert absent == list(range(2, 2 + len(absent)))
    again = records[absent[-1]]
    assert [a["site"] for a in again["accepted"]] == ["clinic", "kitchen"]
    # One frame for the site in step, one for each version that the other lacks.
    frame = records[-1]["bytes_down"] / len(TWO)
    assert again["bytes_down"] == pytest.approx((1 + 1 + len(absent)) * frame, rel=0.02)
    assert list(held_by(tmp_path, session, "kitchen"))[-1] == session.engine.ctx.broadcast.digest


def test_a_site_that_crashed_after_reading_goes_on_from_what_is_on_disk(tmp_path):
    """The answer of round 2 is lost, its frame was applied: the next message may overlap with what is there."""

    def lose(kind, message, answer):
        answer(kind, message)
        return None

    wrap = faulty("kitchen", (2,), lose)
    session, code = run(
        tmp_path,
        "run.rounds=3",
        "clients.quorum=1",
        "clients.deadline-seconds=10",
        "clients.grace-seconds=1",
        wrap=wrap,
    )
    assert code == 0, session.history.reason
    assert [a["site"] for a in commits(tmp_path)[2]["accepted"]] == ["clinic", "kitchen"]
    assert not [r for record in commits(tmp_path) for r in record["rejected"]]


def test_a_gap_is_refused_and_ends_with_a_snapshot(tmp_path):
    """The site's disk loses the model before round 2: it says so, and round 3 brings all of it."""

    def forget(kind, message, answer):
        for folder in (tmp_path / "state" / "kitchen").glob("*/kitchen"):
            for file in folder.glob("held-*"):
                file.unlink()
        return answer(kind, message)

    wrap = faulty("kitchen", (2,), forget)
    session, code = run(tmp_path, "clients.quorum=1", wrap=wrap)
    assert code == 0, session.history.reason
    records = commits(tmp_path)
    assert [(r["site"], r["kind"]) for r in records[1]["rejected"]] == [("kitchen", "gap")]
    assert [a["site"] for a in records[2]["accepted"]] == ["clinic", "kitchen"]
    assert records[2]["bytes_down"] > 1.5 * records[1]["bytes_down"]
    assert list(held_by(tmp_path, session, "kitchen"))[-1] == session.engine.ctx.broadcast.digest


def test_the_same_message_twice_is_the_same_answer(tmp_path):
    def twice(kind, message, answer):
        answer(kind, message)
        return answer(kind, message)

    run(tmp_path / "once")
    session, code = run(tmp_path / "twice", wrap=faulty("kitchen", (2,), twice))
    assert code == 0, session.history.reason
    assert crcs(tmp_path / "twice") == crcs(tmp_path / "once")


def test_a_newcomer_by_log_and_one_by_snapshot_hold_the_same_bits(tmp_path):
    """Row 12, over real frames of a run: from the first model along the log, and from nothing."""
    session, code = run(tmp_path, "train.mode=full", "train.optimizer-state=reset", "run.rounds=2")
    assert code == 0, session.history.reason
    from client_app.held import receive

    link, layout = session.engine.ctx.broadcast, session.start.layout
    start = session.start.state
    Held(tmp_path / "log").store(digest_of(start, layout), start)
    found = []
    for folder, held in (("log", digest_of(start, layout)), ("snapshot", "")):
        parcel = link.parcel(held)
        found.append(receive(tmp_path / folder, parcel.data, parcel.directive["downlink"], layout))
        assert bool(parcel.directive["downlink"]["frames"]) is (folder == "log")
    assert state_crc(found[0]) == state_crc(found[1]) == state_crc(link.shadow)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["run.method=ffa"], "compression.down"),
        (["clients.late=weight"], "clients.late"),
        (["run.checkpoint-every=2"], "run.checkpoint-every"),
        (["telemetry.keep-updates=true"], "telemetry.keep-updates"),
    ],
)
def test_what_cannot_be_right_is_refused_in_words(settings, key):
    from server_app.run import check_codecs
    from umbel.config import resolve

    with pytest.raises(ConfigError, match=key):
        check_codecs(resolve(None, [DOWN, *settings]))


def test_a_site_state_removed_by_hand_is_no_reason_to_end_the_run(tmp_path):
    """Every trace of the run at one site goes between rounds; the run ends well all the same."""

    def forget(kind, message, answer):
        shutil.rmtree(tmp_path / "state" / "clinic", ignore_errors=True)
        return answer(kind, message)

    session, code = run(tmp_path, "clients.quorum=1", wrap=faulty("clinic", (2,), forget))
    assert code == 0, session.history.reason
    assert len(commits(tmp_path)) == 3
