from __future__ import annotations

import json
import subprocess
import sys
import threading

from umbel.telemetry.events import EventLog, read_events, scan_events, tail


def test_an_event_is_one_json_object_a_line(tmp_path):
    log = EventLog(tmp_path / "deep" / "events.jsonl", clock=lambda: 12.3456)
    assert not log.path.exists()
    returned = log.write("dispatched", round=1, site="Zürich", bytes=7)
    assert log.path.read_text("utf-8") == (
        '{"t": 12.346, "event": "dispatched", "round": 1, "site": "Zürich", "bytes": 7}\n'
    )
    assert returned == read_events(log)[0]


def test_every_cut_of_the_last_line_loses_that_line_only(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, clock=lambda: 1.0) as log:
        log.write("first", n=1)
        start = path.stat().st_size
        log.write("second", text="é")
    whole = path.read_bytes()
    for cut in range(start, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [e["event"] for e in read_events(path)] == ["first"]
        with EventLog(path) as again:
            again.write("third")
        assert [e["event"] for e in read_events(path)] == ["first", "third"]
        assert scan_events(path)[1] == (1 if cut > start else 0)


def test_a_killed_writer_keeps_every_event_it_has_written(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import os, sys\nfrom umbel.telemetry.events import EventLog\n"
        "log = EventLog(sys.argv[1])\n"
        "for i in range(50): log.write('tick', i=i)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -9
    assert [e["i"] for e in read_events(path)] == list(range(50))


def test_lines_of_several_threads_do_not_mix(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    threads = [
        threading.Thread(target=lambda n=n: [log.write("e", n=n, pad="x" * 500) for _ in range(100)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events, unreadable = scan_events(log)
    assert (len(events), unreadable) == (400, 0)
    assert sorted(e["n"] for e in events) == sorted(list(range(4)) * 100)


def test_tail_returns_complete_lines_from_an_offset(tmp_path):
    path = tmp_path / "events.jsonl"
    assert tail(path) == ([], 0)
    path.write_text('{"event": "a"}\n{"event": "b"}\n{"event": "c', "utf-8")
    events, offset = tail(path)
    assert [e["event"] for e in events] == ["a", "b"]
    assert tail(path, offset) == ([], offset)
    with path.open("a") as file:
        file.write('"}\n')
    events, end = tail(path, offset)
    assert ([e["event"] for e in events], end) == (["c"], path.stat().st_size)
    path.write_text('{"event": "new"}\n', "utf-8")
    assert [e["event"] for e in tail(path, end)[0]] == ["new"]


def test_lines_that_are_not_events_are_counted_and_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'[1]\n{"t": 1}\n\xff\xfe\n{"event": 3}\n\n{"event": "ok"}\n' + b"[" * 100_000 + b"\n")
    assert scan_events(path) == ([{"event": "ok"}], 5)


def test_the_name_and_the_time_cannot_be_overwritten_by_a_field(tmp_path):
    log = EventLog(tmp_path / "e", clock=lambda: 5.0)
    log.write("sample", t=9, event="forged")
    assert json.loads(log.path.read_text()) == {"t": 5.0, "event": "sample"}
