from __future__ import annotations

import io
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from umbel.cli.show import list_runs_table, show_run
from umbel.cli.watch import Follower, view, watch
from umbel.errors import DataError
from umbel.telemetry.runfolder import RunFolder


def write(run: RunFolder, events: list[dict]) -> None:
    for event in events:
        run.events.write(event["event"], **{k: v for k, v in event.items() if k not in ("t", "event")})


def plain() -> Console:
    return Console(file=io.StringIO(), width=400)


def output(console: Console) -> list[str]:
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_runs_are_listed_with_their_state(two_site_run, failed_run, tmp_path):
    write(RunFolder.create(tmp_path / "good"), two_site_run)
    write(RunFolder.create(tmp_path / "bad"), failed_run)
    RunFolder.create(tmp_path / "new").write_config("")
    console = plain()
    assert list_runs_table(tmp_path, console=console) == 0
    lines = output(console)
    assert lines[0] == "Run State Rounds Held-out loss Change Sites Up Down Time Started"
    assert any(
        line.startswith("good completed 2/3 4.000 -> 2.000 -2.000 2/2 4.0 kB 12.0 kB") for line in lines
    )
    assert any(line.startswith("bad failed 0/5 - - 0/2") for line in lines)
    assert any(line.startswith("new not started 0/-") for line in lines)


def test_no_runs_is_said(tmp_path):
    console = plain()
    assert list_runs_table(tmp_path, console=console) == 0
    assert output(console) == [f"No runs in {tmp_path}."]


def test_a_run_is_shown_with_rounds_sites_and_refusals(two_site_run, tmp_path):
    run = RunFolder.create(tmp_path / "good")
    write(run, two_site_run)
    console = plain()
    assert show_run(run.path, console=console) == 0
    lines = output(console)
    assert (
        "Held-out loss fell from 4.000 to 2.000 (-50.0%) in 2 committed rounds. 2 of 2 sites contributed."
        in lines
    )
    assert "2 skip 1/2 0 1 3.500 3.000 1.0 kB 4.0 kB 20.0s south: no answer" in lines
    assert "north 30 2 500 27 3.0 kB 2.0 kB 3.000 2.000 -1.000" in lines
    assert "joining west join tokenizer differs" in lines
    console = plain()
    show_run(run.path, console=console, last=1)
    assert sum(line.startswith(("1 commit", "2 skip", "3 commit")) for line in output(console)) == 1


def test_names_of_sites_are_text_and_not_instructions_to_the_terminal(tmp_path):
    run = RunFolder.create(tmp_path / "r")
    evil = "[red]x[/red]\x1b[2J"
    write(run, [{"event": "run_started"}, {"event": "site_joined", "site": evil}])
    write(run, [{"event": "round_opened", "round": 1, "selected": [evil]}])
    console = plain()
    show_run(run.path, console=console)
    console.print(view(console, _history(run), 0.0))
    shown = console.file.getvalue()
    assert "[red]x[/red] [2J" in shown
    assert "\x1b" not in shown


def _history(run: RunFolder):
    follower = Follower(run)
    follower.read()
    return follower.history


def test_the_open_round_shows_the_state_of_each_site(two_site_run, tmp_path):
    run = RunFolder.create(tmp_path / "r")
    write(run, two_site_run[:9])
    console = plain()
    assert watch(run.path, once=True, console=console) == 0
    lines = output(console)
    assert "Round 1: 1 of 2 answered" in lines
    assert "north update in 4.000 300 1.0 kB 10.0s" in lines
    assert "south waiting - - - -" in lines
    assert any("running round 0/3 held-out -" in line for line in lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_watching_ends_with_the_exit_code_of_the_run_h29(terminal, two_site_run, failed_run, tmp_path):
    for name, events, code in (("good", two_site_run, 0), ("bad", failed_run, 75)):
        run = RunFolder.create(tmp_path / name)
        write(run, events)
        console = Console(file=io.StringIO(), width=200, force_terminal=terminal)
        assert watch(run.path, console=console, interval_seconds=0.01) == code
        assert f"{events[-1]['outcome']}: " in console.file.getvalue()


def test_a_place_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="no run in this folder"):
        watch(tmp_path, console=plain())


def start_watching(run: RunFolder) -> subprocess.Popen:
    code = (
        # A shell's background job ignores interrupts and passes that on; a person's terminal does not.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from umbel.cli.watch import watch; sys.exit(watch(sys.argv[1], interval_seconds=0.05))"
    )
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


def test_a_watcher_follows_a_growing_log_to_its_end(two_site_run, tmp_path):
    run = RunFolder.create(tmp_path / "r")
    write(run, two_site_run[:8])
    process = start_watching(run)
    try:
        assert process.stdout.readline().startswith("run r: fedit")
        write(run, two_site_run[8:])
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "round 3/3  loss 3.000 (-1.500)" in rest
    assert "completed: 2/3 rounds" in rest


def test_an_interrupt_ends_the_watcher_and_leaves_the_run(two_site_run, tmp_path):
    run = RunFolder.create(tmp_path / "r")
    write(run, two_site_run[:8])
    before = run.events_jsonl.read_bytes()
    process = start_watching(run)
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Stopped watching; the run goes on." in rest
    assert run.events_jsonl.read_bytes() == before
