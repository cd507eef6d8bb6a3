"""What guards a run from outside its rounds: fence, writer, operator's orders, nested waits, supervisor."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest
from support.scripted import Script, edited, make_bench, silent

from server_app import checkpoint
from server_app.fence import Fence, Fenced, Locked
from server_app.operator import parse
from server_app.rounds import SitesGone
from server_app.timeouts import check_nesting
from umbel.checkpoints import CheckpointError, Memory, load_newest
from umbel.config import resolve
from umbel.errors import EXIT_UNAVAILABLE, ConfigError

pytestmark = pytest.mark.fault


def trio() -> list[Script]:
    return [Script("a", 1.0, tokens=10), Script("b", 2.0, tokens=30), Script("c", 4.0, tokens=60)]


def memory(round_index: int) -> Memory:
    return Memory(round_index, 1, {"w": np.full(3, round_index, np.float32)})


def test_f25_a_second_server_of_one_folder_is_refused(tmp_path) -> None:
    first = Fence(tmp_path)
    with pytest.raises(Locked, match="another server is writing"):
        Fence(tmp_path)
    first.close()
    second = Fence(tmp_path)
    assert second.token == first.token + 1
    # Where the lock did not hold, the older server sees the newer token and stops.
    with pytest.raises(Fenced, match=rf"token {second.token}"):
        first.check()
    second.check()


def test_f25_a_damaged_token_never_lets_the_older_one_go_on(tmp_path) -> None:
    first = Fence(tmp_path)
    first.close()
    (tmp_path / "fence.json").write_text("{")
    first.check()
    second = Fence(tmp_path)
    with pytest.raises(Fenced):
        first.check()
    second.close()


def test_f25_a_fenced_writer_writes_nothing(tmp_path) -> None:
    fence = Fence(tmp_path)
    writer = checkpoint.Writer(tmp_path / "checkpoints", keep=3, check=fence.check)
    writer.submit(memory(1))
    assert writer.wait().num_bytes > 0
    (tmp_path / "fence.json").write_text(json.dumps({"token": 99}))
    writer.submit(memory(2))
    with pytest.raises(Fenced):
        writer.wait()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["round-000001"]


def test_the_writer_holds_one_checkpoint_and_is_waited_for(tmp_path) -> None:
    """Durable means: on return of `wait` the checkpoint can be read; before, the caller may not speak of it."""
    gate = threading.Event()
    writer = checkpoint.Writer(tmp_path, keep=3, half_way=lambda r: gate.wait(30))
    assert writer.wait() is None
    writer.submit(memory(1))
    assert load_newest(tmp_path) is None
    with pytest.raises(RuntimeError, match="was not finished"):
        writer.submit(memory(2))
    gate.set()
    assert writer.wait().round == 1
    assert load_newest(tmp_path).round == 1


def test_f12_a_refused_write_in_the_thread_is_survived_and_counted(tmp_path, monkeypatch) -> None:
    writer = checkpoint.Writer(tmp_path, keep=3, max_failures=2)

    def refuse(path, data):
        raise OSError(28, "no space")

    monkeypatch.setattr(checkpoint, "write_durable", refuse)
    writer.submit(memory(1))
    assert writer.wait().num_bytes is None
    writer.submit(memory(2))
    with pytest.raises(CheckpointError, match="2 checkpoints in a row"):
        writer.wait()


def test_messages_leave_only_after_the_round_before_is_durable() -> None:
    """The instruction of round r + 1 tells a site that its update of round r counts."""
    order = []
    bench = make_bench(trio(), before_send=lambda: order.append(("durable", len(bench.grid.sent))))
    bench.engine.run_round()
    bench.engine.run_round()
    joins = 3
    assert order == [("durable", joins), ("durable", joins + 3)]


def test_the_operator_pins_bans_and_unbans(tmp_path) -> None:
    scripts = trio()
    for r in (1, 2, 3):
        scripts[2].faults[r] = edited(weight=-1.0)
    path = tmp_path / "operator.toml"
    bench = make_bench(scripts, operator_file=path)
    for _ in range(3):
        bench.engine.run_round()
    assert bench.engine.run_round()["selected"] == ["a", "b"]
    path.write_text('unban = ["c"]\n')
    assert bench.engine.run_round()["selected"] == ["a", "b", "c"]
    path.write_text('ban = ["b"]\n')
    assert bench.engine.run_round()["selected"] == ["a", "c"]
    # A file that is wrong changes nothing and is said.
    path.write_text("ban = 3\n")
    assert bench.engine.run_round()["selected"] == ["a", "c"]
    assert "must be a list" in bench.of("operator_ignored")[0]["reason"]
    path.unlink()
    assert bench.engine.run_round()["selected"] == ["a", "b", "c"]


def test_a_pinned_site_is_asked_whatever_its_strikes(tmp_path) -> None:
    scripts = trio()
    for r in range(1, 7):
        scripts[2].faults[r] = edited(weight=-1.0)
    bench = make_bench(scripts, operator_file=tmp_path / "operator.toml")
    (tmp_path / "operator.toml").write_text('pin = ["c"]\n')
    assert all("c" in bench.engine.run_round()["selected"] for _ in range(6))


def test_a_pinned_site_is_among_those_drawn(tmp_path) -> None:
    scripts = [Script(f"s{i}", 1.0) for i in range(10)]
    file = tmp_path / "operator.toml"
    bench = make_bench(scripts, "clients.goal=2", "clients.over-provision=1.0", operator_file=file)
    file.write_text('pin = ["s7"]\n')
    drawn = [bench.engine.run_round()["selected"] for _ in range(6)]
    assert all("s7" in names and len(names) == 2 for names in drawn)
    assert len({tuple(names) for names in drawn}) > 1


def test_orders_are_parsed_strictly() -> None:
    with pytest.raises(ValueError, match="unknown entries"):
        parse('kick = ["a"]')
    with pytest.raises(ValueError, match="list of site names"):
        parse("pin = [1]")


def test_f22_a_mute_site_is_left_alone_after_two_rounds_and_probed_later() -> None:
    """F22: its node is online, its worker is dead: every round would last the full wait."""
    scripts = [*trio(), Script("d")]
    for r in range(1, 20):
        scripts[3].faults[r] = silent
    bench = make_bench(scripts)
    selected = [bench.engine.run_round()["selected"] for _ in range(6)]
    assert ["d" in s for s in selected] == [True, True, False, False, True, False]
    alarms = bench.of("site_silent")
    assert [(e["site"], e["round"], e["resting_until"]) for e in alarms] == [("d", 2, 5), ("d", 5, 10)]


def test_f22_a_late_answer_shows_that_a_site_lives() -> None:
    scripts = trio()
    bench = make_bench(scripts, delays={"c": 25.0})
    selected = [bench.engine.run_round()["selected"] for _ in range(5)]
    assert all("c" in s for s in selected)
    assert bench.of("site_silent") == []


def test_f22_a_site_cut_by_the_goal_is_not_called_silent() -> None:
    scripts = [*trio(), Script("d")]
    bench = make_bench(scripts, "clients.goal=3", "clients.over-provision=1.3", delays={"d": 9.0})
    for script in scripts[3:]:
        script.faults.update(dict.fromkeys(range(1, 9), silent))
    assert all(len(bench.engine.run_round()["accepted"]) == 3 for _ in range(4))
    assert bench.of("site_silent") == []


def test_f22_resting_sites_are_woken_before_a_quorum_is_given_up() -> None:
    scripts = trio()
    for r in (1, 2):
        scripts[2].faults[r] = silent
    bench = make_bench(scripts, "clients.quorum=2")
    bench.engine.run_round()
    bench.engine.run_round()
    bench.grid.sites[1].online = False
    assert bench.engine.run_round()["selected"] == ["b", "c"]


def test_f06_when_all_nodes_are_gone_the_wait_is_bounded_and_the_code_says_try_again() -> None:
    bench = make_bench(trio(), "clients.start-timeout-seconds=30")
    bench.engine.run_round()
    for site in bench.grid.sites.values():
        site.online = False
    began = bench.clock.now()
    with pytest.raises(SitesGone, match="only 0 of the 2 sites") as caught:
        bench.engine.run_round()
    assert caught.value.exit_code == EXIT_UNAVAILABLE
    assert 30.0 <= bench.clock.now() - began <= 32.0


def test_waits_that_do_not_nest_are_refused_with_both_values() -> None:
    check_nesting(resolve(None, []), 0.25)
    check_nesting(resolve(None, ["clients.adaptive-deadline=true"]), 0.25)
    with pytest.raises(ConfigError, match=r"clients.deadline-seconds does not nest.*\(5 s\).*got 4\.0"):
        check_nesting(
            resolve(
                None,
                ["clients.deadline-seconds=4", "clients.grace-seconds=1", "clients.min-deadline-seconds=1"],
            ),
            0.25,
        )
    with pytest.raises(ConfigError, match=r"clients.min-deadline-seconds does not nest"):
        check_nesting(
            resolve(None, ["clients.adaptive-deadline=true", "clients.min-deadline-seconds=5"]), 0.25
        )


def test_supervise_resumes_with_back_off_and_stops_where_waiting_cannot_help() -> None:
    from umbel.cli.flower import FlowerError
    from umbel.cli.launch import supervise

    config = resolve(None, ["run.rounds=5"])
    codes, seen, waits = iter([1, 75, 0]), [], []

    def once(ready):
        seen.append(ready.run.resume)
        return next(codes)

    said = []
    assert supervise(config, once, restarts=5, say=said.append, sleep=waits.append) == 0
    assert seen == ["none", "auto", "auto"]
    assert waits == [5.0, 10.0]
    assert "restart 1 of 5" in said[0]
    for hopeless in (65, 78, 130):
        assert (
            supervise(config, lambda c, code=hopeless: code, restarts=5, say=said.append, sleep=waits.append)
            == hopeless
        )
    assert waits == [5.0, 10.0]
    unreachable = iter([FlowerError("the SuperLink is down"), 0])

    def flaky(ready):
        outcome = next(unreachable)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert supervise(config, flaky, restarts=1, say=said.append, sleep=waits.append) == 0
    assert "the SuperLink is down" in said
    calls = []
    assert (
        supervise(config, lambda c: calls.append(c) or 1, restarts=2, say=said.append, sleep=waits.append)
        == 1
    )
    assert len(calls) == 3
    assert dataclasses.replace(calls[1].run, resume="none") == config.run
