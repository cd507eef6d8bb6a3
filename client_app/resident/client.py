"""The side of a message's process: find or start the site's worker, hand the instruction over, wait for the answer.

Every wait has a bound and every end is typed. What the server sees of a worker that died is a refusal within
seconds, not Flower's "process gone" after a minute. Imports neither torch nor Flower.

Node config: `resident` ("on" or "off"), `idle-s` (900; 0: the worker leaves after each message), `grace-s` (30:
what a task gets beyond the instruction's own time before its worker is killed), `memory-bytes` (0: no budget).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_app.resident import wire
from client_app.resident.place import PROTOCOL, Place, key_of, place_of
from client_app.resident.processes import Process, alive, kill_group, oom_kills, process, supernode
from umbel.errors import ConfigError, Refusal, RefusalKind, UmbelError

log = logging.getLogger("flwr.umbel")

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-P", "-m", "client_app.resident.worker")
START_SECONDS = 60.0
HELLO_SECONDS = 30.0
ATTEMPTS = 5
_children: list[subprocess.Popen] = []


@dataclass(frozen=True)
class Site:
    """What the node config says about the worker of this site."""

    name: str
    state_dir: Path
    idle_seconds: float
    grace_seconds: float
    memory_bytes: int

    @property
    def place(self) -> Place:
        return place_of(self.name, self.state_dir)


def wants_worker(node_config: Mapping[str, Any]) -> bool:
    """Return whether a node is served by a worker: not a simulated one, not on other systems, not if turned off."""
    wanted = str(node_config.get("resident", "on")).strip().lower()
    if wanted not in ("on", "off"):
        raise ConfigError(
            "resident",
            "of the node config is unknown",
            got=wanted,
            allowed="'on', 'off'",
            remedy="Leave it out.",
        )
    return sys.platform == "linux" and wanted == "on" and "partition-id" not in node_config


def site_of(node_config: Mapping[str, Any], node_id: int) -> Site:
    """Return the site's settings; raises ConfigError naming the key of the node config that is wrong."""
    from client_app.identity import default_state_dir

    return Site(
        name=str(node_config.get("name") or "").strip() or f"node-{node_id}",
        state_dir=Path(str(node_config.get("state-dir") or default_state_dir())).expanduser(),
        idle_seconds=_number(node_config, "idle-s", 900.0),
        grace_seconds=_number(node_config, "grace-s", 30.0),
        memory_bytes=int(_number(node_config, "memory-bytes", 0.0)),
    )


def _number(node_config: Mapping[str, Any], key: str, default: float) -> float:
    value = node_config.get(key, default)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0.0 <= number < 1e15:
        raise ConfigError(
            key,
            "of the node config is no number of at least 0",
            got=value,
            allowed=">= 0",
            remedy=f"The default is {default:g}.",
        )
    return number


def ask(
    kind: str,
    instruction: Any,
    frame: bytes | None,
    *,
    node_config: Mapping[str, Any],
    node_id: int,
    root: Path = ROOT,
    owner: Process | None = None,
    command: Sequence[str] = COMMAND,
) -> tuple[Any, bytes | None]:
    """Return (reply, update frame or None) of the site's worker for one instruction. Never raises.

    `owner` is the process the worker must not outlive (by default the SuperNode above this process) and `root` the
    folder whose code it runs.
    """
    started = time.monotonic()
    name = str(node_config.get("name") or instruction.site or f"node-{node_id}")
    try:
        site = site_of(node_config, node_id)
        name = site.name
        worker = Conversation(site, key_of(root, node_config), root, owner or supernode(), tuple(command))
        return worker.ask(kind, instruction, frame, dict(node_config), node_id, started)
    except Refusal as error:
        refusal = error
    except UmbelError as error:
        refusal = Refusal(RefusalKind.REFUSED, str(error))
    except Exception as error:
        log.warning("the site's worker could not be used", exc_info=True)
        refusal = Refusal(RefusalKind.EXCEPTION, f"{type(error).__name__} while asking the site's worker")
    log.warning("round %s refused: %s", instruction.round, refusal)
    return refused(instruction, name, refusal), None


def refused(instruction: Any, site: str, refusal: Refusal) -> Any:
    """Return the reply that carries a refusal."""
    from umbel.messages import Reply

    return Reply(
        run=instruction.run,
        round=instruction.round,
        attempt=instruction.attempt,
        base=instruction.base,
        site=site,
        status=str(refusal.kind),
        reason=refusal.reason,
    )


class Conversation:
    """One instruction through one worker."""

    def __init__(
        self, site: Site, key: str, root: Path, owner: Process | None, command: tuple[str, ...]
    ) -> None:
        self.site, self.key, self.root, self.owner, self.command = site, key, root, owner, command
        self.place = site.place
        self.worker: Process | None = None

    def ask(
        self,
        kind: str,
        instruction: Any,
        frame: bytes | None,
        node_config: dict[str, Any],
        node_id: int,
        started: float,
    ) -> tuple[Any, bytes | None]:
        deadline = started + instruction.remaining_seconds + self.site.grace_seconds
        kills = oom_kills()
        with self.reach(deadline) as channel:
            header = {
                "type": "instruct",
                "kind": kind,
                "instruction": dataclasses.asdict(instruction),
                "node_config": node_config,
                "node_id": node_id,
                "spent_seconds": time.monotonic() - started,
            }
            try:
                channel.settimeout(HELLO_SECONDS)
                wire.send(channel, header, frame)
                return self.listen(channel, deadline)
            except wire.WireTimeout:
                self.kill()
                raise Refusal(
                    RefusalKind.DEADLINE,
                    f"no answer {self.site.grace_seconds:g} s after the deadline; the worker was ended",
                ) from None
            except wire.WireClosed:
                self.sweep()
                if oom_kills() > kills:
                    raise Refusal(RefusalKind.OOM, "the kernel ended the worker for want of memory") from None
                raise Refusal(
                    RefusalKind.EXCEPTION,
                    f"the worker died at work; the site's log is {self.place.file('log').name}",
                ) from None
            except wire.WireError as error:
                self.kill()
                raise Refusal(RefusalKind.EXCEPTION, f"the worker spoke out of turn: {error}") from None

    def listen(self, channel: socket.socket, deadline: float) -> tuple[Any, bytes | None]:
        """Pass log lines on until the reply comes."""
        from umbel.messages import Reply, from_record

        while True:
            header, frame = wire.receive(channel, seconds=max(0.0, deadline - time.monotonic()))
            if header["type"] == "log":
                log.log(int(header.get("level", logging.INFO)), "%s", str(header.get("text", ""))[:2000])
            elif header["type"] == "reply":
                try:
                    return from_record(Reply, header.get("reply") or {}), frame
                except ValueError as error:
                    raise wire.WireError(str(error)) from None
            else:
                raise wire.WireError(f"an item of type {header['type'][:40]!r}")

    def reach(self, deadline: float) -> socket.socket:
        """Return a connection to a worker of our key that has said it is ready."""
        self.place.prepare()
        for _ in range(ATTEMPTS):
            with self.place.locked(START_SECONDS):
                channel = self.place.connect() or self.start()
                self.check_peer(channel)
                try:
                    answer = self.hello(channel, deadline)
                except wire.WireClosed:
                    # It left between our connect and our hello: idle for too long, or asked to go.
                    channel.close()
                    continue
            if answer["type"] == "ready":
                return channel
            channel.close()
            if answer.get("why") == "busy":
                raise Refusal(RefusalKind.REFUSED, "another instruction is being worked on at this site")
            # "leaving": the worker ran other code, or with other settings. The next attempt starts a new one.
        raise Refusal(RefusalKind.EXCEPTION, f"no worker became ready in {ATTEMPTS} attempts")

    def hello(self, channel: socket.socket, deadline: float) -> dict[str, Any]:
        channel.settimeout(HELLO_SECONDS)
        greeting = {
            "type": "hello",
            "protocol": PROTOCOL,
            "key": self.key,
            "owner": list(self.owner) if self.owner else None,
            "idle_seconds": self.site.idle_seconds,
        }
        wire.send(channel, greeting)
        # A worker whose former message died finishes its step before it answers: wait as long as the work may.
        try:
            answer, _ = wire.receive(channel, seconds=max(HELLO_SECONDS, deadline - time.monotonic()))
        except wire.WireTimeout:
            self.kill()
            raise Refusal(RefusalKind.DEADLINE, "the worker did not become free; it was ended") from None
        if answer["type"] not in ("ready", "refused"):
            raise Refusal(RefusalKind.EXCEPTION, f"the worker answered {answer['type'][:40]!r} to a greeting")
        return answer

    def check_peer(self, channel: socket.socket) -> None:
        pid, uid = wire.peer(channel)
        if uid != os.getuid():
            channel.close()
            raise Refusal(RefusalKind.REFUSED, f"the worker's socket belongs to uid {uid}, not to this one")
        self.worker = process(pid)

    def start(self) -> socket.socket:
        """Start a worker in a process group of its own and return a connection to it."""
        settings = {
            "site": self.site.name,
            "state_dir": str(self.site.state_dir.absolute()),
            "key": self.key,
            "idle_seconds": self.site.idle_seconds,
            "memory_bytes": self.site.memory_bytes,
            "owner": list(self.owner) if self.owner else None,
        }
        # The working folder stays: relative paths of the node config mean what they meant to the SuperNode.
        path = os.pathsep.join(p for p in (str(self.root), os.environ.get("PYTHONPATH", "")) if p)
        with open(self.place.file("out"), "wb") as out:
            os.chmod(out.fileno(), 0o600)
            child = subprocess.Popen(
                [*self.command, json.dumps(settings)],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        # It usually outlives this process. Where it does not (`umbel site`), those that ended are reaped here.
        _children[:] = [known for known in _children if known.poll() is None] + [child]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            channel = self.place.connect()
            if channel is not None:
                return channel
            if child.poll() is not None:
                raise Refusal(
                    RefusalKind.EXCEPTION,
                    f"the site's worker ended at its start with {child.returncode}; "
                    f"see {self.place.file('out').name} at the site",
                )
            time.sleep(0.02)
        child.kill()
        raise Refusal(RefusalKind.EXCEPTION, f"the site's worker did not start in {START_SECONDS:g} s")

    def kill(self) -> None:
        """End the worker and whatever it started; the slot is free when this returns."""
        worker = self.worker
        if worker is None or not kill_group(worker):
            return
        deadline = time.monotonic() + 10.0
        while alive(worker) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.sweep()

    def sweep(self) -> None:
        """Remove what a worker that was killed could not remove itself."""
        with suppress(OSError), self.place.locked(5.0):
            # A process that is being ended closes its connections before the socket it listens on: look again.
            patience = time.monotonic() + 1.0
            while (channel := self.place.connect()) is not None:
                channel.close()
                if time.monotonic() >= patience:
                    return
                time.sleep(0.05)
            self.place.file("sock").unlink(missing_ok=True)
            self.place.file("json").unlink(missing_ok=True)
