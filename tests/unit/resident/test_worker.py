"""The resident worker as real processes: warm equals cold, private, one at a time, and nothing is left over."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from support.resident_site import Desk, joining, order, renamed, script, settings, start_state, until

from client_app.app import FRAME_STYPE
from client_app.resident import wire
from client_app.resident.place import place_of
from client_app.resident.processes import Process, alive, process
from client_app.service import Service
from client_app.state import SiteState
from umbel.messages import EVALUATE, TRAIN, Instruction

# A service that answers at once and loads nothing; what a test needs differs, so each states its own.
PLAIN = """
class Service:
    def handle(self, kind, instruction, frame, *, node_config, node_id, clock):
        return blank_reply(instruction, node_config["name"], reason=kind), frame
"""
STEPS = '''
import pathlib
class Service:
    """Twenty seconds of steps; the clock is looked at between them."""
    def handle(self, kind, instruction, frame, *, node_config, node_id, clock):
        steps = 0
        try:
            while steps < 200 and not clock.expired:
                pathlib.Path(node_config["state-dir"], "working").write_text(str(steps))
                time.sleep(0.1)
                steps += 1
                clock.note(steps, 10 * steps)
        except Exception as error:
            return blank_reply(instruction, "clinic", status="refused", reason=str(error)), None
        return blank_reply(instruction, "clinic", steps=steps, partial=steps < 200), None
'''
DEAF = STEPS.replace("not clock.expired", "True")


def instruction(**fields) -> Instruction:
    return Instruction(
        **{"run": "r", "round": 1, "attempt": 1, "base": "", "site": "clinic", "remaining_seconds": 60.0}
        | fields
    )


def test_the_thin_process_names_frames_as_the_codec_does() -> None:
    from compression.flower import STYPE

    assert FRAME_STYPE == STYPE


@pytest.mark.timeout(120)
def test_r2_warm_cold_evicted_and_killed_give_the_same_bits(desk, tmp_path) -> None:
    """R2, H: a cache is never the truth; three rounds with kept optimiser moments."""
    config = settings("train.local-steps=2")

    class InProcess(Desk):
        service = Service()

        def ask(self, kind, instruction, frame=None, **extra):
            self.service.bench.clear()
            return self.service.handle(kind, instruction, frame, node_config=self.node, node_id=1)

    evicted = InProcess(tmp_path / "evicted").rounds(config, 3)
    warm = desk(tmp_path / "warm")
    assert warm.rounds(config, 3) == evicted
    assert warm.log().count("loaded in") == 1
    killed = desk(tmp_path / "killed")
    turns = iter((lambda: os.kill(killed.worker().pid, signal.SIGKILL), lambda: None, lambda: None))
    assert killed.rounds(config, 3, between=lambda: next(turns)()) == evicted
    assert killed.log().count("loaded in") == 2


def test_r3_folder_socket_and_files_are_private(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, PLAIN))
    reply, frame = d.ask(TRAIN, instruction(), b"abc")
    assert (reply.status, reply.reason, frame) == ("ok", "train", b"abc")
    assert stat.S_IMODE(d.place.folder.stat().st_mode) == 0o700
    modes = {}
    for path in d.place.folder.iterdir():
        # A file that is being replaced may be gone by now.
        with contextlib.suppress(FileNotFoundError):
            modes[path.name] = stat.S_IMODE(path.stat().st_mode)
    assert modes
    assert set(modes.values()) == {0o600}, modes
    # Its own process group: what ends the message's process does not end it.
    assert os.getpgid(d.worker().pid) == d.worker().pid != os.getpgid(0)


def test_r3_a_folder_that_others_may_enter_is_not_used(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, PLAIN))
    d.place.folder.mkdir(parents=True)
    d.place.folder.chmod(0o755)
    reply, _ = d.ask(TRAIN, instruction())
    assert reply.status == "refused"
    assert "chmod 700" in reply.reason


def test_r3_malformed_and_oversize_requests_do_not_disturb_the_worker(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, PLAIN))
    d.ask(TRAIN, instruction())
    first = d.worker()
    for raw in (b"\0" * 64, b"UMB1" + b"\xff" * 12, b"{}"):
        channel = d.place.connect()
        channel.sendall(raw)
        channel.shutdown(socket.SHUT_WR)
        channel.settimeout(15)
        with contextlib.suppress(ConnectionResetError):
            assert channel.recv(1) == b""
        channel.close()
    with d.place.connect() as channel:
        wire.send(channel, {"type": "hello", "protocol": 99})
        assert wire.receive(channel, seconds=5)[0] == {"type": "refused", "why": "protocol"}
    assert d.ask(TRAIN, instruction())[0].status == "ok"
    assert d.worker() == first


def test_r3_another_uid_is_turned_away_by_the_worker(desk, tmp_path) -> None:
    """The kernel's word on the peer counts, not the file's mode, which is opened here on purpose."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    d = desk(command=script(tmp_path, PLAIN))
    d.ask(TRAIN, instruction())
    d.place.folder.chmod(0o711)
    d.place.file("sock").chmod(0o666)
    folder, name = d.place.folder, d.place.file("sock").name
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.setuid(65534)
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(10)
        try:
            channel.connect(name)
            answer = channel.recv(1)
        except ConnectionError:
            answer = b""
        except OSError:
            answer = b"?"
        os._exit(0 if answer == b"" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    d.place.folder.chmod(0o700)
    assert "uid 65534 was turned away" in d.log()
    assert d.ask(TRAIN, instruction())[0].status == "ok"


def test_r3_new_code_makes_the_old_worker_leave_before_the_next_starts(desk, tmp_path, code) -> None:
    d = desk(command=script(tmp_path, PLAIN))
    d.ask(TRAIN, instruction())
    old = d.worker()
    newer = tmp_path / "newer"
    shutil.copytree(code, newer)
    with open(newer / "client_app/clock.py", "a") as file:
        file.write("# changed\n")
    assert d.ask(TRAIN, instruction(), root=newer)[0].status == "ok"
    assert d.worker() != old
    assert not alive(old)


def test_r3_two_sites_of_one_host_never_meet(tmp_path) -> None:
    places = {place_of(name, tmp_path / folder).file("sock") for name in ("a", "b") for folder in ("x", "y")}
    assert len(places) == 4


def test_one_instruction_at_a_time(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, STEPS))
    first = threading.Thread(target=d.ask, args=(TRAIN, instruction(remaining_seconds=4.0)))
    first.start()
    until((tmp_path / "state/working").exists, "work has begun")
    reply, _ = d.ask(TRAIN, instruction())
    assert (reply.status, reply.reason) == ("refused", "another instruction is being worked on at this site")
    first.join()


def test_progress_can_be_read_while_a_worker_works(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, STEPS))
    work = threading.Thread(target=d.ask, args=(TRAIN, instruction(round=7, remaining_seconds=6.0)))
    work.start()
    until(lambda: (d.facts() or {}).get("step", 0) > 5, "steps are shown")
    facts = d.facts()
    assert (facts["site"], facts["run"], facts["round"], facts["busy"], facts["alive"]) == (
        "clinic",
        "r",
        7,
        True,
        True,
    )
    assert facts["tokens_per_second"] > 0
    assert 0 < facts["deadline_seconds"] < 6
    assert facts["memory_bytes"] > 1_000_000
    work.join()


def test_r5_the_deadline_gives_a_partial_result(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, STEPS))
    reply, _ = d.ask(TRAIN, instruction(remaining_seconds=6.0))
    assert reply.status == "ok"
    assert reply.partial
    assert 1 <= reply.steps < 200


def test_r5_a_task_that_never_looks_at_the_clock_is_ended_after_the_grace(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, DEAF), **{"grace-s": 0.5})
    began = time.monotonic()
    reply, _ = d.ask(TRAIN, instruction(remaining_seconds=1.5))
    assert reply.status == "deadline"
    # Twenty seconds of work were not waited for, and the slot is free again.
    assert time.monotonic() - began < 15
    assert d.facts() is None
    assert not d.place.file("sock").exists()


def test_r5_work_for_a_message_that_died_stops_and_the_worker_serves_the_next(desk, tmp_path) -> None:
    """F: SIGKILL of the message's process."""
    command = script(tmp_path, STEPS)
    d = desk(command=command)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from support.resident_site import Desk\n"
        "from umbel.messages import Instruction\n"
        "from client_app.resident.processes import Process\n"
        "d = Desk(Path(sys.argv[2]), root=Path(sys.argv[3]), command=tuple(sys.argv[5:]))\n"
        "d.owner = Process(*map(int, sys.argv[4].split(':')))\n"
        "d.ask('train', Instruction('r', 1, 1, '', 'clinic', 60.0))\n"
    )
    owner = f"{d.owner.pid}:{d.owner.start}"
    tests = str(__import__("pathlib").Path(__file__).resolve().parents[2])
    shim = subprocess.Popen([sys.executable, "-c", code, tests, str(tmp_path), str(d.root), owner, *command])
    until((tmp_path / "state/working").exists, "work has begun")
    first = d.worker()
    shim.kill()
    shim.wait()
    until(lambda: not d.facts()["busy"], "the worker is free", seconds=5)
    reply, _ = d.ask(TRAIN, instruction(remaining_seconds=1.0))
    assert reply.status == "ok"
    assert d.worker() == first


@pytest.mark.timeout(120)
def test_r4_a_worker_killed_at_work_is_a_typed_refusal_and_leaves_no_trace(desk, tmp_path) -> None:
    """R4: SIGKILL in mid step; the state is as before and the round, done again, gives the same bits."""
    config = settings("train.local-steps=400")
    short = settings("train.local-steps=2")
    start = start_state(config)
    d = desk()
    assert d.ask(TRAIN, *order(short, start, 1))[0].status == "ok"
    before = snapshot(tmp_path)
    answers = []
    work = threading.Thread(
        target=lambda: answers.append((d.ask(TRAIN, *order(config, start, 2)), time.monotonic()))
    )
    work.start()
    until(lambda: (d.facts() or {}).get("step", 0) > 0, "a step has been done")
    os.kill(d.worker().pid, signal.SIGKILL)
    killed = time.monotonic()
    work.join()
    (reply, frame), answered = answers[0]
    assert (reply.status, frame) == ("exception", None)
    assert "died" in reply.reason
    assert answered - killed < 10
    assert snapshot(tmp_path) == before
    assert not d.place.file("sock").exists()
    again, update = d.ask(TRAIN, *order(short, start, 2))
    assert again.status == "ok"
    site = Service()
    node = {**d.node, "state-dir": str(tmp_path / "other")}
    site.handle(TRAIN, *order(short, start, 1), node_config=node, node_id=1)
    assert site.handle(TRAIN, *order(short, start, 2), node_config=node, node_id=1)[1] == update


def snapshot(folder) -> dict[str, str]:
    """Return a digest of every durable file of the site."""
    root = SiteState(folder / "state", "r", "clinic").folder
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


def test_a_worker_without_room_for_model_and_rows_refuses_before_any_work(desk) -> None:
    d = desk(**{"memory-bytes": 1000})
    reply = d.join(settings())
    assert reply.status == "oom"
    assert "memory-bytes is 1000" in reply.reason


def test_idle_workers_leave_and_with_zero_at_once(desk, tmp_path) -> None:
    for idle in (0, 0.6):
        d = desk(tmp_path / str(idle), command=script(tmp_path, PLAIN), **{"idle-s": idle})
        d.node["name"] = f"idle-{idle}"
        assert d.ask(TRAIN, instruction())[0].status == "ok"
        until(lambda d=d: not d.place.file("sock").exists() and d.facts() is None, "the worker leaves")


def test_a_worker_does_not_outlive_its_supernode_even_at_work(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, DEAF))
    supernode = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    d.owner = process(supernode.pid)
    work = threading.Thread(target=d.ask, args=(TRAIN, instruction()))
    work.start()
    until((tmp_path / "state/working").exists, "work has begun")
    worker = d.worker()
    supernode.kill()
    supernode.wait()
    until(lambda: not alive(worker), "the worker is gone")
    work.join()
    assert not d.place.file("sock").exists()


def test_sigterm_makes_an_idle_worker_leave(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, PLAIN))
    d.ask(TRAIN, instruction())
    worker = d.worker()
    os.kill(worker.pid, signal.SIGTERM)
    until(lambda: not alive(worker), "the worker is gone", seconds=5)
    assert not d.place.file("sock").exists()


def test_many_messages_at_once_find_one_worker(desk, tmp_path) -> None:
    d = desk(command=script(tmp_path, PLAIN))
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.append(d.ask(EVALUATE, instruction())[0])) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {r.status for r in replies} <= {"ok", "refused"}
    assert "ok" in {r.status for r in replies}
    assert d.log().count("is up") == 1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("idle-s", "soon", "idle-s of the node config"),
        ("grace-s", -1, "grace-s"),
        ("memory-bytes", "4GB", "memory-bytes"),
    ],
)
def test_wrong_node_settings_are_named(desk, tmp_path, key, value, words) -> None:
    d = desk(command=script(tmp_path, PLAIN), **{key: value})
    reply, _ = d.ask(TRAIN, instruction())
    assert reply.status == "refused"
    assert words in reply.reason


def test_a_worker_that_cannot_start_is_said_at_once(desk) -> None:
    d = desk(command=(sys.executable, "-c", "raise SystemExit(3)"))
    reply, _ = d.ask(TRAIN, instruction())
    assert (reply.status, "ended at its start with 3" in reply.reason) == ("exception", True)


def test_a_pid_that_was_given_to_another_process_is_not_taken_for_the_worker() -> None:
    me = process(os.getpid())
    assert alive(me)
    assert not alive(Process(me.pid, me.start + 1))
    assert not alive(Process(2**22 + 7, 1))


def test_an_instruction_for_another_site_is_refused_by_the_worker_too(desk) -> None:
    d = desk()
    reply, _ = d.ask(TRAIN, renamed(joining(settings()), site="kitchen"))
    assert reply.status == "refused"
    assert "this is 'clinic'" in reply.reason
