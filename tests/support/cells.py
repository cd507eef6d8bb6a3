"""One cell of the matrix method x codec: a run of one round in one process, with every frame that travelled.

run_cell(folder, "carry", CODECS["int8"])      the real server and the real sites over an in-memory grid
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compression import Layout
from compression.flower import array_to_frame
from compression.frame import read_header
from compression.payload import decode_update
from compression.roles import role_for
from support.inprocess import make_session
from umbel.exchange import Exchange
from umbel.messages import CONTROL_RECORD, FRAME_RECORD, TRAIN, Instruction, Reply, from_record

SITES = ("clinic", "kitchen")
SETTINGS = (
    "run.rounds=1",
    "clients.minimum=2",
    "lora.rank=4",
    "lora.alpha=16",
    "lora.heads=2",
    "lora.target-modules=q_proj,down_proj",
    "train.local-steps=1",
    "train.batch-size=2",
    "train.optimizer-state=reset",
    "data.limit=4",
    "data.max-length=64",
    "data.heldout-fraction=0",
    "eval.final=false",
)


class Codec(NamedTuple):
    """A codec as a run is configured with it; `refused` is a word of the reason why it is no codec of updates."""

    policy: str
    feedback: float = 0.0
    refused: str = ""

    @property
    def settings(self) -> list[str]:
        """The overrides of a run with this codec."""
        return [f"compression.up={self.policy}", f"compression.feedback={self.feedback}"]


# Every class of codec that can be built, one or more times; small tensors are coded too, so that each is at work.
CODECS = {
    "exact": Codec("exact"),
    "lossless": Codec("lossless"),
    "bf16": Codec("bf16;min=1"),
    "int8": Codec("int8(64,rtn);min=1"),
    "int8sr": Codec("int8(64,sr);min=1"),
    "int4": Codec("int4(64,rtn);min=1"),
    "int2": Codec("int2(64,rtn);min=1", 1.0),
    "int8cb": Codec("int8cb;min=1"),
    "tok8": Codec("tok8(rtn);min=1", refused="token"),
    "sign": Codec("sign(64);min=1", 1.0),
    "sparse": Codec("topk(64,4)|sign2|rice;min=1", 0.95),
    "dct": Codec("dct(64)|topk(4096,64)|sign2|flat;min=1", 0.95),
    "ecsq": Codec("ecsq(rate=2.0);min=1"),
    "rotation": Codec("had(64)|lm4(unbiased);min=1"),
    "lowrank": Codec("lowrank(1);min=1"),
    "randk": Codec("randk(0.25,unbiased);min=1"),
    "by-role": Codec("lora_a=int8(64,rtn);lora_b=bf16;*=exact;min=1"),
    "xor": Codec("xor;min=1", refused="base"),
    "sparse-alone": Codec("topk(64,4)|sign2|rice;min=1", refused="residual"),
    "unbiased-residual": Codec("int8(64,sr);min=1", 0.95, refused="residual"),
    "exact-residual": Codec("exact", 0.95, refused="feedback"),
    "rice-alone": Codec("int8(64,rtn)|rice", refused="rice"),
}


# What a method cannot run without.
# The factor that fedsa sends does not move in the first step: the other one is zero.
NEEDED = {"fedask": ("run.rounds=2",), "fedsa": ("train.local-steps=3",), "delayed": ("clients.mode=async",)}
# Methods that cannot have a residual (of a random sketch, beside a momentum), and those whose momentum it is.
REFUSE_RESIDUAL, WANT_RESIDUAL = ("delayed", "fedask"), ("sparseloco",)


def refusal(method: str, codec: Codec) -> str:
    """Return a word of the reason why this cell is refused; empty for a cell that must work."""
    wrong = (
        codec.feedback > 0 if method in REFUSE_RESIDUAL else method in WANT_RESIDUAL and not codec.feedback
    )
    return codec.refused or ("residual" if wrong else "")


@dataclass
class Cell:
    """What a cell did: exit code, reason, session, and sizes and names of every frame of round 1 by site."""

    code: int
    reason: str
    session: Any
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    sent: dict[str, set[str]] = field(default_factory=dict)
    named: dict[str, set[str]] = field(default_factory=dict)
    policies: set[str] = field(default_factory=set)


def run_cell(folder: Path, method: str, codec: Codec, *overrides: str) -> Cell:
    """Run one round of a method with a codec on two sites."""
    cell: Cell

    def wrap(name: str, answer: Any) -> Any:
        def handle(kind: str, message: Any) -> Any:
            reply = answer(kind, message)
            if kind == TRAIN:
                look(name, message, reply)
            return reply

        return handle

    def look(name: str, message: Any, reply: Any) -> None:
        order = from_record(Instruction, message.content[CONTROL_RECORD])
        if order.round != 1:
            return
        cell.down[name] = len(array_to_frame(message.content[FRAME_RECORD]["frame"]))
        answer = from_record(Reply, reply.content[CONTROL_RECORD])
        if answer.status != "ok":
            return
        frame = array_to_frame(reply.content[FRAME_RECORD]["frame"])
        given = cell.session.engine.strategy.given[name]
        cell.up[name] = len(frame)
        cell.sent[name] = set(decode_update(frame, given.up_layout, order.up, given.known))
        cell.named[name] = expected_names(cell.session, order)
        cell.policies.add(read_header(frame).policy)

    session = make_session(
        folder,
        *SETTINGS,
        f"run.method={method}",
        *codec.settings,
        *NEEDED.get(method, ()),
        *overrides,
        sites=SITES,
        wrap=wrap,
    )
    cell = Cell(-1, "", session)
    cell.code = session.run()
    cell.reason = session.history.reason
    return cell


def expected_names(session: Any, order: Instruction) -> set[str]:
    """Return the names that the instruction says will come up: the model's own, or those of its form."""
    directives = json.loads(order.directives)
    if "exchange" not in directives:
        return {entry.name for entry in session.start.layout.entries}
    strategy = session.engine.strategy
    form = Exchange.from_dict(directives["exchange"]).up
    tensors: dict[str, np.ndarray] = form.tensors(strategy.modules, strategy.dtype)
    return {entry.name for entry in Layout.from_arrays(tensors, role_for).entries}
