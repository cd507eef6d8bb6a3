"""The site's half for source `true`: head (and tail) with their adapters, chunk by chunk.

    h_j = head(x_j)                         K forwards with the same phi
    two-part: FWD(h_j, labels) -> BWD(dL_j/dh_j, L_j)
    U:        FWD(h_j) -> OUT(z_j);  L_j = loss(tail(z_j), y_j);  GRAD(dL_j/dz_j) -> BWD(dL_j/dh_j)
    all K done: one AdamW step of head and tail

Every L_j is a sum over its label tokens divided by those of the whole chunk: a chunk is exactly gradient accumulation.
All K frames of a kind leave before the first answer is waited for. Only the head's graphs are kept, K of them.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from client_app.workbench import Workbench, pick_device
from compression import Layout
from compression.roles import role_for
from umbel.config.schema import Config
from umbel.errors import Refusal, RefusalKind
from umbel.models.adapter import AdaptedModule
from umbel.models.lora import LoraSettings
from umbel.seeds import derive_seed
from umbel.split import Frame, FrameKind, SplitTransport
from umbel.split_payload import Payload, pack_payload, unpack_payload

IGNORE = -100
AUXILIARY = ("aux-loss", "aux-estimate")


class Described(NamedTuple):
    """The whole adapter, described on the meta device."""

    settings: LoraSettings
    modules: list[AdaptedModule]
    layout: Layout


class ChunkResult(NamedTuple):
    """Sum of token losses and label tokens of a chunk."""

    loss_sum: float
    tokens: int


def described_parts(config: Config) -> Described:
    """Return the whole model's adapter without loading a weight."""
    from umbel.models.adapter import adapted_modules, attach, initial_adapter
    from umbel.models.described import described
    from umbel.models.source import meta_model

    spec, settings = described(config)
    modules = adapted_modules(attach(meta_model(spec), settings))
    start = initial_adapter(modules, settings, config.run.seed)
    return Described(settings, modules, Layout.from_arrays(start, role_for))


_warm: dict[str, Any] = {}


def site_half(bench: Workbench, config: Config, site: Any, cut: dict[str, Any]) -> TrueHalf:
    """Return the half of this process, loaded once a configuration."""
    from umbel.config import to_json

    key = to_json(config, ("model", "lora", "split")) + config.train.device
    if key not in _warm:
        _warm.clear()
        _warm[key] = load_parts(config)
    if config.split.gradient == "none":
        from client_app.tasks.split_frozen import FrozenHalf

        frozen = FrozenHalf(config, *_warm[key])
        frozen.held = cut
        return frozen
    if config.split.gradient in AUXILIARY:
        from client_app.tasks.split_aux import AuxHalf

        return AuxHalf(config, *_warm[key])
    return TrueHalf(config, *_warm[key])


def load_parts(config: Config) -> tuple[Any, Any, Any, str]:
    """Return (head, tail or auxiliary model or None, tokenizer, device)."""
    from umbel.models.described import described
    from umbel.models.part_loading import load_parts as read
    from umbel.models.parts import plan_cut
    from umbel.models.source import load_config, load_tokenizer

    spec, settings = described(config)
    device, s = pick_device(config.train.device), config.split
    cut = plan_cut(load_config(spec), s.head, s.tail if s.shape == "u" else 0)
    second = "aux" if s.gradient in AUXILIARY else "tail"
    parts = ("head", second) if s.shape == "u" or second == "aux" else ("head",)
    found = read(spec, settings, cut._replace(aux=s.aux_blocks), parts, device)
    return found["head"], found.get(second), load_tokenizer(spec), device


def padded(rows: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, labels) int64 [B, T] of a batch, right padded; a causal model needs no mask for that."""
    width = max(len(row.input_ids) for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    labels = np.full((len(rows), width), IGNORE, np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row.input_ids)] = row.input_ids
        labels[i, : len(row.labels)] = row.labels
    return ids, labels


def label_tokens(labels: np.ndarray) -> int:
    """Return how many labels of [B, T] are predicted: the first of a row never is."""
    return int((labels[:, 1:] != IGNORE).sum())


class TrueHalf:
    """Head and tail of one round. `layout` names what travels."""

    def __init__(self, config: Config, head: Any, tail: Any, tokenizer: Any, device: str) -> None:
        from umbel.models.state import to_numpy

        self.config, self.head, self.tail = config, head, tail
        self.tokenizer, self.device = tokenizer, device
        self.named = {**head.parameters, **(tail.parameters if tail is not None else {})}
        self.layout = Layout.from_arrays({n: to_numpy(n, p) for n, p in self.named.items()}, role_for)
        self.dimension = int(head.inner.config.get_text_config().hidden_size)

    # --- state ---

    def start(
        self, received: dict[str, np.ndarray], moments: dict[str, np.ndarray], *, site: str, round_index: int
    ) -> None:
        """Begin a round from the server's tensors and the moments that are kept."""
        from umbel.local_step import make_optimizer

        self._write(received)
        self.site_name = site
        self.seed = derive_seed(self.config.run.seed, "split-codec", site, round_index)
        groups = [self.named]
        if self.tail is not None and self.config.split.tail_step == "batch":
            groups = [self.head.parameters, self.tail.parameters]
        # The last one is the tail's own where it steps by the batch.
        self.steps = [(named, make_optimizer(list(named.values()), self.config.train)) for named in groups]
        self._restore(moments)

    def _write(self, arrays: dict[str, np.ndarray]) -> None:
        import torch

        from umbel.models.state import to_torch

        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(to_torch(arrays[name]))

    def _restore(self, moments: dict[str, np.ndarray]) -> None:
        from client_app.tasks.sft import restore_moments

        for named, optimizer in self.steps:
            restore_moments(optimizer, named, moments)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the half's tensors."""
        from umbel.models.state import to_numpy

        return {name: to_numpy(name, parameter) for name, parameter in self.named.items()}

    def moments(self) -> dict[str, np.ndarray]:
        """Return AdamW's moments."""
        from client_app.tasks.sft import save_moments

        found: dict[str, np.ndarray] = {}
        for named, optimizer in self.steps:
            found.update(save_moments(optimizer, named))
        return found

    def save(self) -> dict[str, np.ndarray]:
        """Return everything a chunk starts from."""
        return {**self.arrays(), **{"moments:" + n: a for n, a in self.moments().items()}}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Inverse of `save`."""
        self._write({n: a for n, a in arrays.items() if not n.startswith("moments:")})
        self._restore({n.removeprefix("moments:"): a for n, a in arrays.items() if n.startswith("moments:")})

    def take(self, parts: dict[str, bytes]) -> None:
        """Take what came with the half's tensors: nothing with this source."""

    def uploads(self) -> dict[str, bytes]:
        """Return what travels with the update besides the adapter: nothing with this source."""
        return {}

    # --- the session ---

    def hello(self) -> bytes:
        """Return what this half is."""
        s = self.config.split
        return json.dumps({"shape": s.shape, "head": s.head, "layout": self.layout.digest()}).encode()

    def check_ready(self, ready: Frame) -> None:
        """Raise Refusal unless the server greets."""
        if ready.kind is not FrameKind.READY:
            raise Refusal(RefusalKind.REFUSED, f"the server's half answers {ready.kind.name} to a greeting")

    def chunk(
        self, index: int, groups: list[list[Any]], transport: SplitTransport, rate: float
    ) -> ChunkResult:
        """Do one chunk: K batches of rows, one step with learning rate `rate`."""
        import torch

        batches = [padded(rows) for rows in groups]
        counts = [label_tokens(labels) for _, labels in batches]
        total = sum(counts)
        if total == 0:
            return ChunkResult(0.0, 0)
        for _, optimizer in self.steps:
            optimizer.zero_grad(set_to_none=True)
        outs = []
        for step, (ids, labels) in enumerate(batches):
            hidden = self.head(torch.from_numpy(ids).to(self.device))
            outs.append(hidden)
            shown = labels.astype(np.int32) if self.tail is None else None
            self._send(
                transport, FrameKind.FWD, index, step, Payload(hidden, total, counts[step], 0.0, shown)
            )
        loss_sum = self._tail(transport, index, batches, counts, rate) if self.tail is not None else 0.0
        for hidden in outs:
            back = self._receive(transport, FrameKind.BWD, self.config.split.gradient_codec, hidden)
            loss_sum += back.loss if self.tail is None else 0.0
            hidden.backward(back.tensor.to(hidden))
        self._step(0, rate)
        return ChunkResult(loss_sum, total)

    def _tail(
        self,
        transport: SplitTransport,
        index: int,
        batches: list[tuple[np.ndarray, np.ndarray]],
        counts: list[int],
        rate: float,
    ) -> float:
        import torch

        from umbel.split_loss import hidden_loss

        loss_sum, total = 0.0, sum(counts)
        for step, (ids, labels) in enumerate(batches):
            like = torch.empty((*ids.shape, self.dimension))
            out = self._receive(transport, FrameKind.OUT, self.config.split.activation_codec, like)
            z = out.tensor.to(self.device).requires_grad_(True)
            wanted = torch.from_numpy(labels).to(self.device)
            loss = hidden_loss(self.tail.output, self.tail(z), wanted, self.config.split.loss_block)
            (loss / total).backward()
            loss_sum += float(loss.detach())
            # The body works on this one while the tail goes on; it steps only when all K are back.
            self._send(transport, FrameKind.GRAD, index, step, Payload(z.grad, total, counts[step]))
            if len(self.steps) > 1 and counts[step]:
                self._tail_step(rate, total / counts[step])
        return loss_sum

    def _tail_step(self, rate: float, scale: float) -> None:
        """Let the tail step on this batch alone: its gradient is the batch's own mean again. Not exact."""
        for parameter in self.tail.parameters.values():
            parameter.grad *= scale
        self._step(-1, rate)
        self.steps[-1][1].zero_grad(set_to_none=True)

    def _step(self, which: int, rate: float) -> None:
        import torch

        named, optimizer = self.steps[which]
        clip = self.config.train.clip_norm
        if clip > 0:
            torch.nn.utils.clip_grad_norm_(list(named.values()), clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    def _send(
        self, transport: SplitTransport, kind: FrameKind, chunk: int, step: int, payload: Payload
    ) -> None:
        s = self.config.split
        codec = s.activation_codec if kind is FrameKind.FWD else s.gradient_codec
        data = pack_payload(payload, codec, derive_seed(self.seed, kind.name, chunk, step))
        transport.send(Frame(kind, chunk, step, data))

    def _receive(self, transport: SplitTransport, kind: FrameKind, codec: str, like: Any) -> Payload:
        frame = transport.receive()
        if frame.kind is not kind:
            raise Refusal(RefusalKind.REFUSED, f"the server answers {frame.kind.name}, not {kind.name}")
        rows, width, _ = like.shape
        found = unpack_payload(
            frame.payload, codec, self.dimension, max_rows=rows, max_width=width, labels=False
        )
        if tuple(found.tensor.shape[:2]) != (rows, width):
            raise Refusal(RefusalKind.REFUSED, "the server answers a tensor of another batch")
        return found
