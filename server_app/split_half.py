"""The server's half of split learning: one warm body, one adapter a site, for source `true`.

    two-part   FWD(h, labels): backward at once, BWD(dL/dh, L)
    U          FWD(h): OUT(z), no graph;  GRAD(dL/dz): body(h) once more with a graph, backward, BWD(dL/dh)
    the last BWD of a chunk: one AdamW step of psi_i

The base weights exist once; a site's tensors are put into the body for the length of one forward or one backward,
under a lock, never across frames. psi_i of the last two chunks is kept, so that both halves can stop at the same one.
`server-copies = shared`: all sites step one psi, in order of arrival.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from umbel.config import Config
from umbel.local_step import make_optimizer, rate_at
from umbel.seeds import derive_seed
from umbel.split import SAVE_HEAD, Frame, FrameKind, Ledger, SplitError
from umbel.split_payload import HEAD, Payload, pack_payload, unpack_payload


class BodyResult(NamedTuple):
    """The body's tensors after a chunk and the label tokens of all chunks up to it."""

    arrays: dict[str, np.ndarray]
    tokens: int


class Saved(NamedTuple):
    """Both halves of a pair after a chunk, as they can still count when the site dies later; `frame` is the site's."""

    chunk: int
    loss_sum: float
    frame: bytes
    body: BodyResult


def describe(config: Config) -> tuple[int, Any]:
    """Return (width d, cut) of a model without loading a weight; raises ModelError when it cannot be cut so."""
    from umbel.models.described import described
    from umbel.models.parts import plan_cut
    from umbel.models.source import meta_model

    found = meta_model(described(config)[0]).config
    s = config.split
    cut = plan_cut(found, s.head, s.tail if s.shape == "u" else 0)
    return int(found.get_text_config().hidden_size), cut


def load_body(config: Config, cut: Any) -> Any:
    """Return the body with its adapter, on the device of this machine."""
    import torch

    from umbel.models.described import described
    from umbel.models.part_loading import load_part

    spec, settings = described(config)
    device = "cuda" if torch.cuda.is_available() and config.train.device != "cpu" else "cpu"
    return load_part(spec, settings, cut, "body", device)


class Body:
    """The body model of one run. Loaded at the first round, warm from then on."""

    def __init__(self, config: Config, names: list[str]) -> None:
        """`names` are the tensors of the whole state."""
        self.config, self.names = config, names
        self.lock = threading.Lock()
        self.part: Any = None
        self.shared: Psi | None = None
        self._index = (0, 0)
        # A saved half may be larger than a batch; set by whoever knows the layout.
        self.saved_bytes = 0
        self.dimension, self.cut = describe(config)

    @property
    def max_frame_bytes(self) -> int:
        """Bytes of a payload at most, from the batch and the width of the model."""
        tokens = self.config.train.batch_size * self.config.data.max_length
        batch = tokens * (4 * self.dimension + 8) + HEAD.size + 1024
        return max(batch, self.saved_bytes) if self.config.split.save_every else batch

    def site_names(self) -> list[str]:
        """Return the tensors that live at the sites."""
        from umbel.models.parts import names_of

        return names_of(self.names, self.cut, "head") + names_of(self.names, self.cut, "tail")

    def body_names(self) -> list[str]:
        """Return the tensors of the body."""
        from umbel.models.parts import names_of

        return names_of(self.names, self.cut, "body")

    def directive(self, site: str) -> dict[str, Any]:
        """Return what an instruction says of the cut besides the link."""
        return {"chunk": self.config.split.chunk}

    def down(self, site: str) -> dict[str, bytes]:
        """Return what one site is sent besides its half: nothing with this source."""
        return {}

    def begin(
        self, index: int, attempt: int, state: Mapping[str, np.ndarray], first_step: int, total_steps: int
    ) -> None:
        """Start a round from a state."""
        if self.part is None:
            self.part = load_body(self.config, self.cut)
            if set(self.part.parameters) != set(self.body_names()):
                raise AssertionError("the body's tensors are not those of the state")
        self._index = (index, attempt)
        self.schedule = (first_step, total_steps)
        self._state = {name: np.array(state[name]) for name in self.part.parameters}
        self.shared = Psi(self, self._state) if self.config.split.server_copies == "shared" else None

    def open(self, site: str) -> BodyHalf:
        """Return the half of one site for this round."""
        psi = self.shared or Psi(self, self._state)
        return BodyHalf(
            self, site, psi, derive_seed(self.config.run.seed, "split-body", site, self._index[0])
        )

    def after(
        self, state: Mapping[str, np.ndarray], sites: list[str]
    ) -> tuple[Mapping[str, np.ndarray], dict[str, Any]]:
        """Return the body of the next state where it is not the mean of the sites', and what to record of it."""
        return (self.shared.arrays() if self.shared is not None else {}), {}


class Psi:
    """One adapter of the body with its optimiser."""

    def __init__(self, body: Body, arrays: Mapping[str, np.ndarray]) -> None:
        import torch

        from umbel.models.state import to_torch

        self.body = body
        self.values = {
            n: torch.nn.Parameter(to_torch(arrays[n]).to(p.device).clone())
            for n, p in body.part.parameters.items()
        }
        self.optimizer = make_optimizer(list(self.values.values()), body.config.train)

    def put(self) -> None:
        """Put this adapter into the body; gradients then add up in `values`."""
        for name, parameter in self.body.part.parameters.items():
            parameter.data, parameter.grad = self.values[name].data, self.values[name].grad

    def take_gradients(self) -> None:
        """Keep the gradients that a backward pass has left in the body."""
        for name, parameter in self.body.part.parameters.items():
            self.values[name].grad, parameter.grad = parameter.grad, None

    def step(self, rate: float, clip: float) -> None:
        """Do one step and forget the gradients."""
        import torch

        if clip > 0:
            torch.nn.utils.clip_grad_norm_(list(self.values.values()), clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return copies of the tensors."""
        from umbel.models.state import to_numpy

        return {name: to_numpy(name, value) for name, value in self.values.items()}


class BodyHalf:
    """One site's body in one round: `answer` one frame after the other, then `result`."""

    def __init__(self, body: Body, site: str, psi: Psi, seed: int) -> None:
        self.body, self.site, self.psi, self.seed = body, site, psi, seed
        self.config = body.config
        self._kept: dict[int, Any] = {}
        self._done: set[int] = set()
        self._tokens = self._chunk_tokens = 0
        self._results: dict[int, BodyResult] = {}
        self._chunk = 0
        self._ledger = Ledger()
        self.saved: Saved | None = None

    def answer(self, frame: Frame) -> Frame:
        """Return the answer to one frame; raises SplitError when it does not belong here."""
        if frame.kind is FrameKind.HELLO:
            return Frame(FrameKind.READY, 0, 0, self._ready(frame))
        if frame.kind is FrameKind.DONE:
            return Frame(FrameKind.DONE, frame.chunk, frame.step, b"")
        if frame.kind is FrameKind.SAVE:
            return self._save(frame)
        if frame.chunk > self._chunk:
            if frame.chunk != self._chunk + 1 or (self._chunk and self._chunk not in self._results):
                raise SplitError(f"chunk {frame.chunk} begins before chunk {self._chunk} is complete")
            self._chunk, self._kept, self._done = frame.chunk, {}, set()
            self._chunk_tokens = 0
        with self.body.lock:
            return self._forward(frame) if frame.kind is FrameKind.FWD else self._gradient(frame)

    def _save(self, frame: Frame) -> Frame:
        if frame.chunk not in self._results or len(frame.payload) < SAVE_HEAD.size:
            raise SplitError(f"chunk {frame.chunk} cannot be saved: it is not complete here")
        tokens, loss_sum = SAVE_HEAD.unpack_from(frame.payload)
        body = self._results[frame.chunk]
        if tokens != body.tokens or not np.isfinite(loss_sum):
            raise SplitError(f"the site counts {tokens} tokens, the body saw {body.tokens}")
        self.saved = Saved(frame.chunk, loss_sum, bytes(frame.payload[SAVE_HEAD.size :]), body)
        self._ledger.add({"adapter_up": len(frame.payload)})
        return Frame(FrameKind.SAVE, frame.chunk, frame.step, b"")

    def _ready(self, frame: Frame) -> bytes:
        s = self.config.split
        try:
            said = json.loads(frame.payload)
        except ValueError:
            raise SplitError("the greeting is no JSON") from None
        if said.get("shape") != s.shape or said.get("head") != s.head:
            raise SplitError(
                f"the site is cut as {said.get('shape')!r}, {said.get('head')!r}, not as this run"
            )
        return json.dumps({"chunk": self._chunk}).encode()

    def _forward(self, frame: Frame) -> Frame:
        import torch

        s, two_part = self.config.split, self.config.split.shape == "two-part"
        given = self._unpack(frame, s.activation_codec, labels=two_part)
        self._count(frame, given, "act_up")
        h = given.tensor.to(self.body.part.device)
        self.psi.put()
        if two_part:
            return self._backward(frame, h, given, labels=given.labels)
        with torch.no_grad():
            z = self.body.part(h)
        self._kept[frame.step] = h
        data = self._pack(Payload(z, given.total, given.tokens), s.activation_codec, frame)
        self._ledger.add({"out_down": len(data)})
        return Frame(FrameKind.OUT, frame.chunk, frame.step, data)

    def _gradient(self, frame: Frame) -> Frame:
        if frame.kind is not FrameKind.GRAD or frame.step not in self._kept:
            raise SplitError(f"{frame.kind.name} {frame.chunk}.{frame.step} has no forward before it")
        given = self._unpack(frame, self.config.split.gradient_codec, labels=False)
        self._count(frame, given, "grad_up")
        self.psi.put()
        return self._backward(frame, self._kept[frame.step], given, labels=None)

    def _backward(self, frame: Frame, h: Any, given: Payload, *, labels: np.ndarray | None) -> Frame:
        """Forward with a graph and backward, from the loss or from the gradient at the tail's input."""
        import torch

        from umbel.split_loss import hidden_loss

        leaf = h.detach().requires_grad_(True)
        z = self.body.part(leaf)
        loss = 0.0
        if labels is not None:
            summed = hidden_loss(
                self.body.part.output,
                z,
                torch.from_numpy(labels.astype(np.int64)).to(z.device),
                self.config.split.loss_block,
            )
            (summed / max(1, given.total)).backward()
            loss = float(summed.detach())
        else:
            if z.shape != given.tensor.shape:
                raise SplitError("a gradient has another shape than the output it is for")
            z.backward(given.tensor.to(z))
        self.psi.take_gradients()
        self._done.add(frame.step)
        self._chunk_tokens += given.tokens
        self._kept.pop(frame.step, None)
        data = self._pack(
            Payload(leaf.grad, given.total, given.tokens, loss), self.config.split.gradient_codec, frame
        )
        self._ledger.add({"grad_down": len(data)})
        if len(self._done) == self.config.split.chunk:
            self._complete(frame.chunk)
        return Frame(FrameKind.BWD, frame.chunk, frame.step, data)

    def _complete(self, chunk: int) -> None:
        self.psi.step(self._rate(chunk), self.config.train.clip_norm)
        self._tokens += self._chunk_tokens
        self._results[chunk] = BodyResult(self.psi.arrays(), self._tokens)
        self._results.pop(chunk - 2, None)

    def _rate(self, chunk: int) -> float:
        first, total = self.body.schedule
        return rate_at(self.config.train, first + chunk - 1, total)

    def _unpack(self, frame: Frame, codec: str, *, labels: bool) -> Payload:
        c = self.config
        return unpack_payload(
            frame.payload,
            codec,
            self.body.dimension,
            max_rows=c.train.batch_size,
            max_width=c.data.max_length,
            labels=labels,
        )

    def _pack(self, payload: Payload, codec: str, frame: Frame) -> bytes:
        seed = derive_seed(self.seed, frame.kind.name, frame.chunk, frame.step)
        return pack_payload(payload, codec, seed)

    def _count(self, frame: Frame, given: Payload, category: str) -> None:
        labels = 0 if given.labels is None else 4 * given.labels.size
        self._ledger.add({category: len(frame.payload) - labels, "label_up": labels})

    def ledger(self) -> dict[str, int]:
        """Return bytes of payloads by category."""
        return dict(self._ledger.bytes)

    def result(self, chunk: int) -> BodyResult:
        """Return the body after `chunk`; raises SplitError when it is not one of the last two complete ones."""
        if chunk not in self._results:
            raise SplitError(f"the body has no complete chunk {chunk}, it has {sorted(self._results)}")
        return self._results[chunk]
