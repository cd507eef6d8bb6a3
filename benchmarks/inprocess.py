"""The product in one process: real engine and real sites over an in-memory grid, no waiting.

Used by benchmarks that compare arms at equal work; network and processes are measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from client_app.identity import Identity, identify
from client_app.service import Service
from compression.flower import array_to_frame, frame_to_array
from server_app.run import Session
from umbel.config import Config
from umbel.messages import CONTROL_RECORD, FRAME_RECORD, Instruction, from_record, to_record


@dataclass(frozen=True)
class Deployed:
    """A site as its operator would start it: a name, a data source, a folder for its state."""

    name: str
    data: str
    state_dir: Path

    @property
    def node_config(self) -> dict[str, str]:
        return {"name": self.name, "data": self.data, "state-dir": str(self.state_dir)}

    def identity(self, config: Config) -> Identity:
        """Return the identity its messages are answered under."""
        return identify(self.node_config, 0, config)


class InProcessGrid(Grid):
    """Answers every message at once, in the caller's thread."""

    def __init__(self, sites: list[Deployed], service: Service) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self._sites = dict(enumerate(sites, start=1))
        self._service = service
        self._replies: dict[str, Message] = {}
        self._count = 0

    def set_run(self, run: Any) -> None:
        """Not used: there is no Flower run."""

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self._sites)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            self._count += 1
            ids.append(f"m{self._count}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._replies[ids[-1]] = self._answer(message)
        return ids

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        order = from_record(Instruction, message.content[CONTROL_RECORD])
        frame = (
            array_to_frame(message.content[FRAME_RECORD]["frame"])
            if FRAME_RECORD in message.content
            else None
        )
        reply, update = self._service.handle(
            message.metadata.message_type,
            order,
            frame,
            node_config=self._sites[node].node_config,
            node_id=node,
        )
        records: dict[str, Any] = {CONTROL_RECORD: to_record(reply)}
        if update is not None:
            records[FRAME_RECORD] = ArrayRecord({"frame": frame_to_array(update)})
        return Message(RecordDict(records), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def run_in_process(config: Config, sites: list[Deployed], service: Service) -> Session:
    """Run a configuration over `sites` and return the finished session; raises RuntimeError when it failed."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    session = Session(
        config, InProcessGrid(sites, service), simulated=True, now=lambda: clock[0], sleep=sleep
    )
    code = session.run()
    if code:
        raise RuntimeError(f"the run ended with {code}: {session.history.reason}")
    return session
