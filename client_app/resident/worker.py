"""The resident worker of one site: serves one instruction at a time and keeps what is expensive to load.

    python -m client_app.resident.worker '{"site": ..., "state_dir": ..., "key": ..., ...}'

It is started by `client_app.resident.client` and leaves by itself: when idle for long enough, on SIGTERM, when a
message comes that needs other code, and when the SuperNode it serves is gone. The main thread works; threads
listen, watch the connection of the message being served and the SuperNode, and write the progress file. When the
message's process dies, the work stops before its next step: what it staged is never acknowledged, so the site
stands where it stood. Nothing that is loaded here is ever the truth (`client_app.workbench`).

No Flower here. Log lines of `umbel` go to the message's process, message text only; the whole log stays at the
site and rotates.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from client_app.resident import progress, wire
from client_app.resident.place import PROTOCOL, Place, hold, place_of
from client_app.resident.processes import Process, alive, process, resident_bytes
from client_app.resident.watch import WorkClock

log = logging.getLogger("umbel.worker")

TICK_SECONDS = 0.25
ALIVE_SECONDS = 30.0
SHAKE_SECONDS = 10.0
BODY_SECONDS = 600.0
SEND_SECONDS = 120.0
# After a reason to leave, a step may still end; then the process goes whatever it is doing.
LEAVE_SECONDS = 5.0
LOG_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Settings:
    """What a worker is told when it is started."""

    site: str
    state_dir: str
    key: str
    idle_seconds: float = 900.0
    memory_bytes: int = 0
    owner: list[int] | None = None


class Job:
    """One instruction and the connection it came by."""

    def __init__(self, channel: socket.socket, header: dict[str, Any], frame: bytes | None) -> None:
        self.channel, self.header, self.frame = channel, header, frame
        self.gone = threading.Event()
        self.done = threading.Event()
        self.answered = False
        self.sending = threading.Lock()
        self.began_at = time.time()
        self.clock: WorkClock | None = None
        self.instruction: Any = None

    def send(self, header: dict[str, Any], frame: bytes | None = None) -> None:
        """Send to the message's process; a process that is gone is taken note of, and nothing else happens."""
        try:
            with self.sending:
                self.channel.settimeout(SEND_SECONDS)
                wire.send(self.channel, header, frame)
        except wire.WireError:
            self.gone.set()


class Forward(logging.Handler):
    """Sends our own log lines to the message's process: level and text, never a traceback or an argument."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(logging.INFO)
        self.worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        job = self.worker.job
        if job is not None and not job.gone.is_set():
            job.send({"type": "log", "level": record.levelno, "text": record.getMessage()})


class Worker:
    """Serves the slot of one site until there is a reason to leave."""

    def __init__(self, settings: Settings, make_service: Callable[[], Any]) -> None:
        self.settings, self.make_service = settings, make_service
        self.place: Place = place_of(settings.site, Path(settings.state_dir))
        self.me = process(os.getpid())
        self.owner = Process(*settings.owner) if settings.owner else None
        self.idle_seconds = settings.idle_seconds
        self.service: Any = None
        self.job: Job | None = None
        self.served = 0
        self.free = threading.Condition()
        # Taken by a connection from its greeting until its instruction is answered or it goes away.
        self.taken: object | None = None
        self.last_used = time.monotonic()
        self.leaving = ""
        self.leave_by = float("inf")
        self.jobs: queue.Queue[Job] = queue.Queue()

    # --- main thread ---

    def run(self) -> int:
        """Serve; returns the exit code."""
        self.place.prepare()
        try:
            claim = hold(self.place.file("alive"), ALIVE_SECONDS)
        except TimeoutError:
            return 75
        self.start_logging()
        signal.signal(signal.SIGTERM, lambda *_: self.leave("SIGTERM"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        listener = self.place.listen()
        for loop in (lambda: self.accept(listener), self.watch):
            threading.Thread(target=loop, daemon=True).start()
        log.debug("worker %d of site %s is up", os.getpid(), self.settings.site)
        try:
            while not self.leaving:
                try:
                    job = self.jobs.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    self.leave_if_idle()
                    continue
                self.serve(job)
                self.leave_if_idle()
        finally:
            self.place.file("sock").unlink(missing_ok=True)
            self.place.file("json").unlink(missing_ok=True)
            listener.close()
            claim.close()
        logging.getLogger("umbel.worker").debug("worker %d leaves: %s", os.getpid(), self.leaving)
        return 0

    def leave_if_idle(self) -> None:
        with self.free:
            # One that has served nobody yet waits for whoever started it.
            patience = self.idle_seconds if self.served else max(self.idle_seconds, ALIVE_SECONDS)
            if self.taken is None and time.monotonic() - self.last_used >= patience:
                self.leave(f"idle for {self.idle_seconds:g} s")

    def serve(self, job: Job) -> None:
        """Do one job and send its answer."""
        from umbel.messages import Instruction

        self.job = job
        header, frame = job.header, job.frame
        try:
            instruction = Instruction(**header["instruction"])
            remaining = instruction.remaining_seconds - float(header["spent_seconds"])
            job.instruction = instruction
            job.clock = WorkClock(remaining, lambda: self.abandoned(job))
            self.report()
            if self.service is None:
                self.service = self.make_service()
            reply, update = self.service.handle(
                header["kind"],
                instruction,
                frame,
                node_config=header["node_config"],
                node_id=int(header["node_id"]),
                clock=job.clock,
            )
            self.job, job.answered = None, True
            job.send({"type": "reply", "reply": asdict(reply)}, update)
            if reply.status == "exception" and device_is_suspect():
                self.leave("an error that may have left the device unusable")
        except Exception as error:
            # Only what lies outside of the service ends here: the other side sees the connection close.
            log.warning("instruction not served: %s", type(error).__name__, exc_info=True)
        finally:
            self.job = None
            job.done.set()
            job.channel.close()
            self.release(job)
            self.served += 1
            self.report()

    def abandoned(self, job: Job) -> str:
        if job.gone.is_set():
            return "the process of this message is gone"
        return f"the worker leaves: {self.leaving}" if self.leaving else ""

    def leave(self, reason: str) -> None:
        """Leave as soon as no step runs, and in a few seconds in any case."""
        if not self.leaving:
            self.leave_by = time.monotonic() + LEAVE_SECONDS
            self.leaving = reason

    # --- other threads ---

    def accept(self, listener: socket.socket) -> None:
        while not self.leaving:
            try:
                channel, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self.meet, args=(channel,), daemon=True).start()

    def meet(self, channel: socket.socket) -> None:
        """Check who is there, take the instruction, then watch that the other side stays."""
        token = object()
        try:
            uid = wire.peer(channel)[1]
            if uid != os.getuid():
                log.warning("a connection of uid %d was turned away", uid)
                return
            hello, _ = wire.receive(channel, seconds=SHAKE_SECONDS, header_limit=1 << 16, frame_limit=0)
            refusal = self.judge(hello, token)
            if refusal:
                wire.send(channel, {"type": "refused", "why": refusal})
                return
            wire.send(channel, {"type": "ready"})
            header, frame = wire.receive(channel, seconds=BODY_SECONDS)
            check_instruction(header)
        except wire.WireError as error:
            log.debug("a connection ended: %s", error)
            self.release(token)
            return
        finally:
            if self.taken is not token:
                channel.close()
        job = Job(channel, header, frame)
        with self.free:
            self.taken = job
        self.jobs.put(job)
        while not job.done.wait(0.05):
            if hung_up(channel):
                job.gone.set()
                return

    def judge(self, hello: dict[str, Any], token: object) -> str:
        """Take the worker for this connection, or return why not: "protocol", "busy" or "leaving"."""
        if hello["type"] != "hello" or hello.get("protocol") != PROTOCOL:
            return "protocol"
        with self.free:
            while self.taken is not None:
                held = self.taken
                if not (isinstance(held, Job) and (held.answered or held.gone.is_set())):
                    return "busy"
                self.free.wait(TICK_SECONDS)
            if self.leaving:
                return "leaving"
            if hello.get("key") != self.settings.key:
                self.leave("a message needs other code or settings")
                return "leaving"
            self.taken = token
            self.idle_seconds = float(hello.get("idle_seconds", self.idle_seconds))
            if hello.get("owner"):
                self.owner = Process(*hello["owner"])
        return ""

    def release(self, holder: object) -> None:
        with self.free:
            if self.taken is holder:
                self.taken = None
                self.last_used = time.monotonic()
                self.free.notify_all()

    def watch(self) -> None:
        """Look after the SuperNode, the time to leave and the progress file."""
        turn = 0
        while True:
            time.sleep(TICK_SECONDS)
            if self.owner is not None and not alive(self.owner):
                self.leave("its SuperNode is gone")
            if time.monotonic() >= self.leave_by:
                self.place.file("sock").unlink(missing_ok=True)
                self.place.file("json").unlink(missing_ok=True)
                os._exit(0)
            turn += 1
            if self.job is not None and turn % 4 == 0:
                self.report()

    def report(self) -> None:
        """Write the progress file."""
        job = self.job
        facts: dict[str, Any] = {
            "site": self.settings.site,
            "state_dir": self.settings.state_dir,
            "pid": os.getpid(),
            "start": self.me.start if self.me else 0,
            "served": self.served,
            "busy": job is not None,
            "memory_bytes": resident_bytes(os.getpid()),
            "idle_seconds": self.idle_seconds,
        }
        if job is not None and job.instruction is not None and job.clock is not None:
            facts |= {
                "kind": job.header["kind"],
                "run": job.instruction.run,
                "round": job.instruction.round,
                "step": job.clock.steps,
                "tokens_per_second": job.clock.tokens_per_second,
                "deadline_seconds": job.clock.left_seconds,
                "began_at": job.began_at,
            }
        with suppress(OSError):
            progress.write(self.place.file("json"), facts)

    def start_logging(self) -> None:
        """Our own lines go to the message's process; everything goes to a file at the site, which rotates."""
        path = self.place.file("log")
        file = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=2, delay=False)
        os.chmod(path, 0o600)
        file.setFormatter(logging.Formatter("%(created).3f %(levelname)s %(name)s %(message)s"))
        logging.getLogger().addHandler(file)
        ours = logging.getLogger("umbel")
        ours.setLevel(logging.DEBUG)
        ours.addHandler(Forward(self))


def check_instruction(header: dict[str, Any]) -> None:
    """Raise WireError unless the header is an instruction of this protocol."""
    kinds = {"kind": str, "instruction": dict, "node_config": dict, "node_id": int, "spent_seconds": float}
    if header["type"] != "instruct" or set(header) != {"type", *kinds}:
        raise wire.WireError("not an instruction")
    for name, kind in kinds.items():
        if type(header[name]) is not kind:
            raise wire.WireError(f"{name} must be {kind.__name__}")


def hung_up(channel: socket.socket) -> bool:
    """Return whether the other side has closed the connection; it has nothing left to say otherwise."""
    try:
        poll = select.poll()
        poll.register(channel, select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def device_is_suspect() -> bool:
    """Return whether this process holds a GPU: after an unforeseen error its context may be unusable."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def main() -> int:
    """Entry point."""
    settings = Settings(**json.loads(sys.argv[1]))

    def make_service() -> Any:
        from client_app.service import Service

        return Service(memory_bytes=settings.memory_bytes)

    return Worker(settings, make_service).run()


if __name__ == "__main__":
    sys.exit(main())
