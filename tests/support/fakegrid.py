"""A grid in memory with virtual time: the real server and the real sites, no process, no network, no waiting.

`FakeGrid` implements Flower's `Grid`. A site is any callable (kind, message) -> Message | None; `app_site` wraps
the project's own ClientApp code. Each site has a delay in virtual seconds, so that deadlines, graces and late
updates are tested exactly and at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Answer = Callable[[str, Message], Message | None]


class VirtualClock:
    """Time that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class FakeSite:
    """One node: what it answers, how long it takes and whether it is connected."""

    answer: Answer
    delay_seconds: float = 1.0
    online: bool = True


@dataclass
class FakeGrid(Grid):
    """Nodes by id. A message's reply is computed when it is sent and can be pulled after the node's delay."""

    clock: VirtualClock
    sites: dict[int, FakeSite] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Flower stamps messages with the identity of the process that its own launcher sets.
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self._replies: dict[str, tuple[float, Message]] = {}
        self._count = 0

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, site in self.sites.items() if site.online]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        site = self.sites.get(node)
        if site is None or not site.online:
            return ""
        self._count += 1
        message_id = f"m{self._count}"
        message.metadata.__dict__["_message_id"] = message_id
        self.sent.append(message)
        reply = site.answer(message.metadata.message_type, message)
        if reply is not None:
            self._replies[message_id] = (self.clock.now() + site.delay_seconds, reply)
        return message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for message_id in message_ids:
            due, reply = self._replies.get(message_id, (float("inf"), None))
            if reply is not None and due <= self.clock.now():
                del self._replies[message_id]
                found.append(reply)
        return found

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        ids = list(self.push_messages(messages))
        self.clock.sleep(timeout or 3600.0)
        return self.pull_messages(ids)


def failing_site(code: int = 8, reason: str = "") -> Answer:
    """Return a site whose process dies: every message comes back as Flower's error `code`."""
    return lambda kind, message: Message(Error(code, reason), reply_to=message)


def silent_site() -> Answer:
    """Return a site that takes messages and never answers."""
    return lambda kind, message: None


def app_site(node_id: int, node_config: dict[str, Any]) -> Answer:
    """Return the project's own ClientApp as a site."""
    from client_app.app import answer

    def handle(kind: str, message: Message) -> Message:
        context = Context(
            run_id=1, node_id=node_id, node_config=dict(node_config), state=RecordDict(), run_config={}
        )
        return answer(kind, message, context)

    return handle
