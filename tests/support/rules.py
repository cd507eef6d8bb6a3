"""Every method end to end on the project's own sites, with what is needed to check it from outside.

After each site's local work the effective update of every layer is read off the live model: the layer's output on
the identity with the base weight set to zero. No formula of a method is used for that, so the weighted mean of these
matrices is the truth that exact methods are compared with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import client_app.train_round
import compression
from client_app.tasks.work import local_work
from compression import Layout
from compression.flower import array_to_frame
from compression.payload import decode_update
from compression.roles import role_for
from support.inprocess import commits, make_session
from umbel.exchange import Exchange
from umbel.messages import CONTROL_RECORD, FRAME_RECORD, TRAIN, Instruction, Reply, from_record

SITES = ("clinic", "kitchen")
SETTINGS = (
    "run.rounds=2",
    "clients.minimum=2",
    "lora.rank=4",
    "lora.alpha=16",
    "lora.heads=2",
    "lora.target-modules=q_proj,v_proj,down_proj",
    "train.optimizer-state=reset",
    "data.limit=8",
    "data.max-length=64",
    "eval.final=true",
)
GPT2 = ("model.name=builtin:tiny-gpt2", "lora.target-modules=c_attn,c_proj")


def effective(model: Any) -> dict[str, np.ndarray]:
    """Return the update [out, in] float64 of every adapted layer as the forward pass applies it."""
    import torch

    from umbel.models.adapter import _lora_layers

    found = {}
    with torch.no_grad():
        for name, layer in _lora_layers(model):
            base = layer.get_base_layer()
            kept = [(p, p.detach().clone()) for p in base.parameters()]
            for parameter, _ in kept:
                parameter.zero_()
            found[name] = layer(torch.eye(layer.in_features)).T.double().numpy()
            for parameter, value in kept:
                parameter.copy_(value)
    return found


@dataclass
class Wire:
    """One train message and its answer."""

    site: str
    round: int
    exchange: Exchange
    down: dict[str, np.ndarray]
    up: dict[str, np.ndarray]
    weight: float


@dataclass
class Finished:
    """A run that ended: its session, its wire, and what every site held after its work, by (round, site)."""

    session: Any
    folder: Path
    code: int
    wire: list[Wire] = field(default_factory=list)
    held: dict[tuple[int, str], dict[str, np.ndarray]] = field(default_factory=dict)

    @property
    def records(self) -> list[dict[str, Any]]:
        return commits(self.folder)

    def ideal(self, round_index: int) -> dict[str, np.ndarray]:
        """Return the weighted mean of the sites' effective updates of a round."""
        weights = {w.site: w.weight for w in self.wire if w.round == round_index}
        total = sum(weights.values())
        first = self.held[round_index, min(weights)]
        return {
            layer: sum(w / total * self.held[round_index, site][layer] for site, w in weights.items())
            for layer in first
        }


def run_method(monkeypatch: Any, folder: Path, method: str, *overrides: str, **options: Any) -> Finished:
    """Run a method on two sites for two rounds and return everything seen."""
    done: Finished
    sites = options.pop("sites", SITES)

    def work(trains: str, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = local_work(trains, model, *args, **kwargs)
        done.held[kwargs["round_index"], kwargs["site"]] = effective(model)
        return result

    def wrap(name: str, answer: Any) -> Any:
        def handle(kind: str, message: Any) -> Any:
            reply = answer(kind, message)
            if kind == TRAIN:
                look(name, message, reply)
            return reply

        return handle

    def look(name: str, message: Any, reply: Any) -> None:
        order = from_record(Instruction, message.content[CONTROL_RECORD])
        answer = from_record(Reply, reply.content[CONTROL_RECORD])
        if answer.status != "ok":
            return
        exchange = Exchange.from_dict(json.loads(order.directives).get("exchange", {}))
        strategy = done.session.engine.strategy
        down, up = (array_to_frame(m.content[FRAME_RECORD]["frame"]) for m in (message, reply))
        # A frame decodes only against exactly its own tensors.
        wanted = [f.tensors(strategy.modules, strategy.dtype) for f in (exchange.down, exchange.up)]
        first, second = (Layout.from_arrays(tensors, role_for) for tensors in wanted)
        received = compression.decode(down, first)
        sent = decode_update(up, second, order.up, {**wanted[1], **received})
        done.wire.append(Wire(name, order.round, exchange, received, sent, answer.weight))

    monkeypatch.setattr(client_app.train_round, "local_work", work)
    session = make_session(
        folder, *SETTINGS, f"run.method={method}", *overrides, sites=sites, wrap=wrap, **options
    )
    done = Finished(session, folder, -1)
    done.code = session.run()
    return done


def exported(done: Finished) -> tuple[Any, Any]:
    """Return (PeftModel loaded from the run's adapter folder, the base it wraps)."""
    from peft import PeftModel

    from umbel.models.source import load_model

    base = load_model(done.session.start.spec)
    return PeftModel.from_pretrained(base, str(done.folder / "run" / "adapter")), base


def served(done: Finished) -> Any:
    """Return a model that holds the final state as the sites are served it."""
    from umbel.models.adapter import attach
    from umbel.models.reshape import load_adapter
    from umbel.models.source import load_model

    start = done.session.start
    model = attach(load_model(start.spec), start.settings)
    load_adapter(model, done.session.engine.state, start.settings)
    return model.eval()


def logits(model: Any) -> np.ndarray:
    """Return float64 logits on a fixed probe."""
    import torch

    ids = (torch.arange(24).reshape(2, 12) * 37 + 11) % model.config.get_text_config().vocab_size
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits.double().numpy()


def distance(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """Return |got - want|_F / |want|_F over all layers."""
    assert set(got) == set(want)
    square = sum(float(((got[n] - want[n]) ** 2).sum()) for n in want)
    return float(np.sqrt(square / sum(float((w**2).sum()) for w in want.values())))
