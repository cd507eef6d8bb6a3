"""The Flower ClientApp: unwraps a message, lets the service answer, wraps the answer. It never raises."""

from __future__ import annotations

import logging
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from umbel.messages import (
    CONTROL_RECORD,
    EVALUATE,
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


def answer(kind: str, message: Message, context: Context) -> Message:
    """Return the reply to one message; a message that is not ours gets an error reply."""
    global _service
    from client_app.service import Service
    from compression.flower import array_to_frame, frame_to_array

    try:
        instruction = from_record(Instruction, control_of(message.content))
        frame = None
        if FRAME_RECORD in message.content:
            frame = array_to_frame(message.content[FRAME_RECORD]["frame"])
    except (MessageError, ValueError, KeyError, TypeError) as error:
        return Message(
            Error(CLIENT_APP_RAISED, f"not an instruction of this version: {error}"), reply_to=message
        )
    if _service is None:
        _service = Service()
    reply, update = _service.handle(
        kind, instruction, frame, node_config=dict(context.node_config), node_id=context.node_id
    )
    records: dict[str, Any] = {CONTROL_RECORD: to_record(reply)}
    if update is not None:
        records[FRAME_RECORD] = ArrayRecord({"frame": frame_to_array(update)})
    return Message(RecordDict(records), reply_to=message)


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Say who this site is and what it has."""
    return answer(JOIN, message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the site's rows from the state in the message."""
    return answer(TRAIN, message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the state in the message on the site's held-out rows."""
    return answer(EVALUATE, message, context)
