"""Sites made of numbers: they speak the real protocol and train nothing, so an engine runs in milliseconds.

A `Script` says what a site answers in a round: the change it adds to the state, or a fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Error, Message, RecordDict

import compression
from compression import Layout
from compression.flower import array_to_frame, frame_to_array
from server_app.joining import Joining
from server_app.mailbox import Mailbox
from server_app.operator import Operator
from server_app.rounds import Engine
from server_app.sites import Registry
from strategies.fedavg import FedAvg
from support.fakegrid import FakeGrid, FakeSite, VirtualClock
from umbel.config import Config, resolve
from umbel.messages import (
    CONTROL_RECORD,
    FRAME_RECORD,
    JOIN,
    TRAIN,
    Instruction,
    Reply,
    from_record,
    to_record,
)

STATE = {"b": np.zeros(3, np.float32), "w": np.arange(4, dtype=np.float32).reshape(2, 2)}


@dataclass
class Script:
    """One site. `change[r]` (or `default`) is added to every element in round r; `faults[r]` replaces the answer."""

    name: str
    default: float = 1.0
    tokens: int = 10
    change: dict[int, float] = field(default_factory=dict)
    faults: dict[int, Callable[[Message, Reply, dict], Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    seen: list[Instruction] = field(default_factory=list)

    def __call__(self, kind: str, message: Message) -> Message | None:
        order = from_record(Instruction, message.content[CONTROL_RECORD])
        self.seen.append(order)
        reply = Reply(order.run, order.round, order.attempt, order.base, self.name)
        if kind == JOIN:
            facts = {"rows_train": 5, "rows_heldout": 2, **self.facts}
            return wrap(message, replace(reply, metrics=json.dumps(facts)))
        layout = Layout.from_arrays(STATE)
        state = compression.decode(array_to_frame(message.content[FRAME_RECORD]["frame"]), layout)
        if kind != TRAIN:
            sums = {"heldout": {"loss_sum": 4.0, "tokens": 2, "correct": 1}}
            return wrap(message, replace(reply, metrics=json.dumps(sums)))
        step = np.float32(self.change.get(order.round, self.default))
        arrays = {name: value + step for name, value in state.items()}
        reply = replace(reply, weight=float(self.tokens), tokens=self.tokens, steps=1, loss=1.0, metrics="{}")
        fault = self.faults.get(order.round)
        if fault is not None:
            return fault(message, reply, arrays)
        return wrap(message, reply, arrays)


def wrap(message: Message, reply: Reply, arrays: Mapping[str, np.ndarray] | None = None) -> Message:
    """Return the Flower reply that carries `reply` and, if given, the arrays as an exact frame."""
    records: dict[str, Any] = {CONTROL_RECORD: to_record(reply)}
    if arrays is not None:
        layout = Layout.from_arrays(arrays)
        records[FRAME_RECORD] = ArrayRecord({"frame": frame_to_array(compression.encode(arrays, layout))})
    return Message(RecordDict(records), reply_to=message)


def wrap_bytes(message: Message, reply: Reply, frame: bytes) -> Message:
    """Return a reply whose frame is exactly these bytes."""
    records = {CONTROL_RECORD: to_record(reply), FRAME_RECORD: ArrayRecord({"frame": frame_to_array(frame)})}
    return Message(RecordDict(records), reply_to=message)


def died(code: int = 8, reason: str = "") -> Callable[[Message, Reply, dict], Message]:
    """Fault: the site's process ends; Flower answers for it."""
    return lambda message, reply, arrays: Message(Error(code, reason), reply_to=message)


def refused(kind: str, reason: str = "a reason") -> Callable[[Message, Reply, dict], Message]:
    """Fault: a typed refusal."""
    return lambda message, reply, arrays: wrap(message, replace(reply, status=kind, reason=reason))


def silent(message: Message, reply: Reply, arrays: dict) -> None:
    """Fault: no answer, ever."""


def edited(**fields: Any) -> Callable[[Message, Reply, dict], Message]:
    """Fault: a reply with other header fields."""
    return lambda message, reply, arrays: wrap(message, replace(reply, **fields), arrays)


def changed(edit: Callable[[dict], dict]) -> Callable[[Message, Reply, dict], Message]:
    """Fault: other arrays, encoded without the checks an honest site would do."""
    return lambda message, reply, arrays: wrap(message, reply, edit(arrays))


@dataclass
class Bench:
    """An engine over scripted sites, its events and its clock."""

    engine: Engine
    grid: FakeGrid
    clock: VirtualClock
    events: list[dict[str, Any]]
    scripts: dict[str, Script]

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [e for e in self.events if e["event"] == event]

    @property
    def values(self) -> list[float]:
        """Return the state of tensor `b` as plain numbers."""
        return [float(x) for x in self.engine.state["b"]]


def make_bench(
    scripts: list[Script],
    *overrides: str,
    delays: Mapping[str, float] | None = None,
    fault: Callable[[str, int], Any] = lambda point, round_index: None,
    join: bool = True,
    before_send: Callable[[], None] = lambda: None,
    operator_file: Path | None = None,
    method: Callable[..., Any] = FedAvg,
) -> Bench:
    """Return an engine whose sites have joined. Defaults: deadline 100 s, grace 20 s, quorum half."""
    settings = [
        "clients.deadline-seconds=100",
        "clients.grace-seconds=20",
        f"clients.minimum={max(1, len(scripts))}",
    ]
    config: Config = resolve(None, [*settings, *overrides])
    clock = VirtualClock()
    grid = FakeGrid(clock)
    for number, script in enumerate(scripts, start=1):
        grid.sites[number] = FakeSite(script, delay_seconds=(delays or {}).get(script.name, 1.0))
    events: list[dict[str, Any]] = []

    def record(event: str, /, *, fsync: bool = False, **fields: Any) -> None:
        events.append({"event": event, **fields})

    layout = Layout.from_arrays(STATE)
    mailbox = Mailbox(grid, threaded=False)
    joining = Joining(
        grid,
        mailbox,
        Registry(),
        run="run-1",
        config_json="{}",
        on_event=record,
        now=clock.now,
        sleep=clock.sleep,
        patient=False,
    )
    engine = Engine(
        config,
        method(config, layout),
        {k: v.copy() for k, v in STATE.items()},
        mailbox,
        joining,
        run="run-1",
        on_event=record,
        now=clock.now,
        sleep=clock.sleep,
        poll_seconds=0.5,
        fault=fault,
        before_send=before_send,
        operator=Operator(operator_file, record),
    )
    if join:
        joining.wait_for_start(config.clients.minimum, config.clients.start_timeout_seconds)
    return Bench(engine, grid, clock, events, {s.name: s for s in scripts})
