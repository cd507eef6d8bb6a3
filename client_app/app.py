"""The Flower ClientApp: unwraps a message, lets the service answer, wraps the answer. It never raises.

At a real site Flower starts a process for every message. That process stays thin, without torch, and hands the
instruction to the site's resident worker. A simulated site is served in this process, which is a Ray actor and
lives on; so is a real one whose node config says `resident="off"`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.gate import gated
from client_app.resident.client import ask, wants_worker
from umbel.errors import UmbelError
from umbel.messages import (
    CONTROL_RECORD,
    EVALUATE,
    FOLLOW_UP,
    FRAME_RECORD,
    JOIN,
    TRAIN,
    Instruction,
    MessageError,
    control_of,
    from_record,
    to_record,
)

log = logging.getLogger("umbel.site")
app = ClientApp()

# One a process: a simulation's actor serves many sites with one warm model.
_service: Any = None

# Flower's code for "the ClientApp could not make sense of the message" (flwr.common.constant.ErrorCode).
CLIENT_APP_RAISED = 2

# As in `compression.flower`, whose import would cost every message more than all of this module (a test compares).
FRAME_STYPE = "umbel/frame@1"


def answer(
    kind: str, message: Message, context: Context, *, through: Callable[..., Any] | None = None
) -> Message:
    """Return the reply to one message; a message that is not ours gets an error reply.

    `through` takes the instruction and returns (reply, frame); by default the node config decides who does, behind
    the site's gate (`client_app.gate`).
    """
    if kind == FOLLOW_UP:
        return Message(RecordDict({CONTROL_RECORD: ConfigRecord()}), reply_to=message)
    try:
        instruction = from_record(Instruction, control_of(message.content))
        frame = None
        if FRAME_RECORD in message.content:
            frame = frame_of(message.content[FRAME_RECORD]["frame"])
        through = through or gated(ask if wants_worker(context.node_config) else in_process)
    except (MessageError, UmbelError, ValueError, KeyError, TypeError) as error:
        return Message(
            Error(CLIENT_APP_RAISED, f"not an instruction of this version: {error}"), reply_to=message
        )
    reply, update = through(
        kind, instruction, frame, node_config=dict(context.node_config), node_id=context.node_id
    )
    records: dict[str, Any] = {CONTROL_RECORD: to_record(reply)}
    if update is not None:
        records[FRAME_RECORD] = ArrayRecord({"frame": array_of(update)})
    return Message(RecordDict(records), reply_to=message)


def in_process(kind: str, instruction: Instruction, frame: bytes | None, **node: Any) -> Any:
    """Let this process's own service answer; it stays warm as long as the process lives."""
    global _service
    if _service is None:
        from client_app.service import Service

        _service = Service()
    return _service.handle(kind, instruction, frame, **node)


def frame_of(array: Array) -> bytes:
    """Return the bytes of a frame; raises ValueError when the array is none (`compression.flower` says what is)."""
    if (array.stype, array.dtype) != (FRAME_STYPE, "uint8") or tuple(array.shape) != (len(array.data),):
        raise ValueError(f"an array of stype {array.stype!r}, dtype {array.dtype!r} is no frame")
    return array.data


def array_of(frame: bytes) -> Array:
    """Return the array that carries a frame."""
    return Array(dtype="uint8", shape=(len(frame),), stype=FRAME_STYPE, data=frame)


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Say who this site is and what it has."""
    return answer(JOIN, message, context)


@app.query("follow_up")
def follow_up(message: Message, context: Context) -> Message:
    """Answer at once: the SuperNode that ran this asks for the next message right away."""
    return answer(FOLLOW_UP, message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the site's rows from the state in the message."""
    return answer(TRAIN, message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the state in the message on the site's held-out rows."""
    return answer(EVALUATE, message, context)
