"""Federated LoRA, QLoRA and split learning for one model, batch, link and device: bytes, memory, time, and a choice.

    a                    = B T d s                    one tensor across the cut; s bytes a value after the codec
    bytes(site, round)   = N c a + labels + masks + 2 |phi, tau|      c = 2 two-part, 4 U, 1 frozen (first round only)
    time(site, round)    = bytes / link + 2 c (N / K) latency         transfer alone, no computing
    memory(split site)   = embedding + k (+ t) blocks + K graphs of a head batch + K a + adapters and moments (+ loss)
    memory(LoRA site)    = base (QLoRA: matrices in 4 bit) + the graph of one batch + adapters and moments + loss

N batches of B rows of T tokens a round. A graph is counted as GRAPH_VALUES values of width d a token and block (with
the MLP's own width beside), an estimate; weights, adapters and bytes on the wire are exact. Loads no weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from umbel.cli.plan import FRAME_BYTES
from umbel.config import Config, resolve
from umbel.exchange import A, B
from umbel.telemetry import units

# Values of width d that a block keeps a token for its backward: two norms, q, k, v, attention out, two residuals, MLP in.
GRAPH_VALUES = 9
# Values of the MLP's width: gate, up, their product.
GRAPH_MLP_VALUES = 3
# A weight of 4 bits with one float32 scale for 64 of them, itself quantised (Dettmers et al. 2023, arXiv 2305.14314).
FOUR_BIT = 0.516
# Header, step numbers and sizes of a frame and of gRPC around it.
STEP_BYTES = 64
BYTES_A_VALUE = {"raw": 4.0, "bf16": 2.0, "int8": 1.0}
SAYS = (
    "Split learning moves 100 to 1,000 times more bytes than federated LoRA: it saves device memory, not bytes. "
    "Raw text stays at the site, but the server can invert activations: it knows the pretrained head. Two-part and "
    "split-frozen also show it the labels, which for a language model are the text; U does not."
)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts in its dtype and of its adapters in theirs."""

    blocks: int
    width: int
    inner: int
    vocabulary: int
    tied: bool
    embedding_bytes: int
    block_bytes: int
    head_bytes: int
    matrix_values: int
    base_bytes: int
    itemsize: int
    adapter_bytes: int
    adapter_values_a_block: float
    adapter_itemsize: int

    def adapter(self, blocks: int) -> float:
        """Return the bytes of the adapters of so many blocks."""
        return self.adapter_values_a_block * blocks * self.adapter_itemsize


@dataclass(frozen=True)
class Row:
    """One way to train: bytes of a site and round each way, bytes it holds, seconds of transfer."""

    way: str
    up_bytes: float
    down_bytes: float
    memory_bytes: float
    seconds: float
    labels_leave: bool
    fits: bool | None = None
    note: str = ""


def sizes(config: Config) -> Sizes:
    """Measure a model on the meta device."""
    from umbel.models.adapter import attach
    from umbel.models.described import described
    from umbel.models.source import meta_model
    from umbel.models.state import state_tensors

    spec, settings = described(config)
    model = meta_model(spec)
    text = model.config.get_text_config()
    blocks = int(text.num_hidden_layers)
    unique = {id(p): (name, p) for name, p in model.named_parameters()}
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    in_blocks = [p for n, p in unique.values() if ".layers." in n or ".h." in n]
    item = embedding.element_size()
    tensors = state_tensors(attach(model, settings), "lora")
    values = sum(t.numel() for n, t in tensors.items() if n.endswith((A, B)))
    return Sizes(
        blocks,
        int(text.hidden_size),
        int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        int(text.vocab_size),
        head is embedding,
        embedding.numel() * item,
        sum(p.numel() for p in in_blocks) * item // blocks,
        head.numel() * item,
        sum(p.numel() for p in in_blocks if p.ndim == 2),
        sum(p.numel() for _, p in unique.values()) * item,
        item,
        sum(t.numel() * t.element_size() for t in tensors.values()),
        values / blocks,
        next(iter(tensors.values())).element_size(),
    )


class SplitPlan:
    """The five ways for one configuration; `link_mbit` and `latency_ms` are the site's, memory in bytes."""

    def __init__(self, config: Config, *, link_mbit: float, latency_ms: float, device_bytes: float) -> None:
        self.config, self.device_bytes = config, device_bytes
        self.link, self.latency = link_mbit * 1e6 / 8.0, latency_ms / 1000.0
        self.sizes = sizes(config)
        split = config.run.task == "split"
        self.chunk = config.split.chunk if split else config.train.accumulation
        self.batches = config.train.local_steps * self.chunk
        self.rows = config.train.batch_size
        self.tokens = self.rows * config.data.max_length

    def _value(self, codec: str) -> float:
        return BYTES_A_VALUE.get(codec, 4.0) * self.sizes.width + (4.0 if codec == "int8" else 0.0)

    def tensor(self, codec: str) -> float:
        """Return a: the bytes of one batch's tensor across the cut."""
        return self.tokens * self._value(codec)

    def graph(self, blocks: int) -> float:
        """Return the bytes that one batch keeps for the backward pass of so many blocks."""
        s = self.sizes
        return 4.0 * self.tokens * blocks * (GRAPH_VALUES * s.width + GRAPH_MLP_VALUES * s.inner)

    def loss(self, rows: int) -> float:
        """Return the bytes of logits of so many tokens, with their gradient."""
        return 8.0 * rows * self.sizes.vocabulary

    def trained(self, adapter: float) -> float:
        """Return the bytes of an adapter with gradient and AdamW's two moments in float32."""
        return adapter * (1.0 + 12.0 / self.sizes.adapter_itemsize)

    def rows_of(self) -> list[Row]:
        """Return one row a way, with `fits` where a device memory is given."""
        made = [self._lora(), self._qlora(), self._split("two-part"), self._split("u"), self._frozen()]
        if not self.device_bytes:
            return made
        return [Row(**{**asdict(row), "fits": row.memory_bytes <= self.device_bytes}) for row in made]

    def _lora(self) -> Row:
        s = self.sizes
        up = s.adapter_bytes + FRAME_BYTES
        memory = s.base_bytes + self.graph(s.blocks) + self.trained(s.adapter_bytes) + self.loss(self.tokens)
        return Row("federated LoRA", up, up, memory, 2 * up / self.link + 2 * self.latency, False)

    def _qlora(self) -> Row:
        row, s = self._lora(), self.sizes
        memory = row.memory_bytes - s.matrix_values * (s.itemsize - FOUR_BIT)
        return Row("QLoRA (4 bit)", row.up_bytes, row.down_bytes, memory, row.seconds, False)

    def _split(self, shape: str) -> Row:
        s, c = self.sizes, self.config.split
        head, tail = min(c.head, s.blocks), (min(c.tail, s.blocks - c.head) if shape == "u" else 0)
        adapter = s.adapter(head + tail) + FRAME_BYTES
        h, g = self.tensor(c.activation_codec), self.tensor(c.gradient_codec)
        labels = 0.0 if shape == "u" else 4.0 * self.tokens
        mask = self.tokens / 8.0
        once = STEP_BYTES * (2 if shape == "u" else 1)
        up = self.batches * (h + (g if shape == "u" else 0.0) + labels + mask + once) + adapter
        down = self.batches * (g + (h if shape == "u" else 0.0) + once) + adapter
        crossings = 4 if shape == "u" else 2
        chunks = -(-self.batches // self.chunk)
        seconds = (up + down) / self.link + (crossings * chunks + 2) * self.latency
        memory = s.embedding_bytes + (head + tail) * s.block_bytes + self.trained(adapter)
        memory += self.chunk * (self.graph(head) + h)
        if shape == "u":
            memory += self.graph(tail) + self.loss(min(c.loss_block, self.tokens))
            memory += 0 if s.tied else s.head_bytes
        way = f"split {shape} ({head}" + (f" + {tail} blocks)" if tail else " blocks)")
        return Row(way, up, down, memory, seconds, shape != "u")

    def _frozen(self) -> Row:
        s, c = self.sizes, self.config.split
        h = self.tensor(c.activation_codec)
        once = self.batches * (h + 4.0 * self.tokens + self.tokens / 8.0 + STEP_BYTES)
        memory = s.embedding_bytes + c.head * s.block_bytes + h + self.graph(1) / 2.0
        note = "activations leave once, in the first rounds; later rounds move next to nothing"
        return Row(
            "split-frozen", once, FRAME_BYTES, memory, once / self.link + 2 * self.latency, True, note=note
        )

    def recommend(self, rows: list[Row]) -> str:
        """Return which way to take, in one sentence with its reason."""
        lora, qlora, two_part, u, frozen = rows
        limit = self.config.clients.deadline_seconds
        if not self.device_bytes:
            return "federated LoRA, wherever it fits: give --device-memory to see whether it does"
        have = units.size(self.device_bytes)
        if lora.fits:
            times = u.up_bytes / lora.up_bytes
            return f"federated LoRA: it fits in {have}, and moves {times:,.0f} times less than split U"
        if qlora.fits:
            return f"QLoRA: the model fits in {have} in 4 bit, and nothing but adapters travels"
        for row in (u, two_part):
            private = row.labels_leave and self.config.split.labels == "private"
            if row.fits and not private and row.seconds <= limit:
                return f"{row.way}: the model does not fit in {have} even in 4 bit, this part does" + (
                    "; the server reads the labels" if row.labels_leave else ""
                )
        if frozen.fits and self.config.split.labels != "private":
            why = (
                f"exact split would spend {units.duration(u.seconds)} a round on the link alone"
                if (u.fits or two_part.fits)
                else "no other way fits"
            )
            return f"split-frozen: {why}; the head is not trained and the server keeps the activations"
        return f"none: nothing fits in {have} within clients.deadline-seconds; use a smaller model, batch or split.head"

    def report(self) -> dict[str, Any]:
        """Return everything as plain data."""
        rows = self.rows_of()
        lora = rows[0].up_bytes + rows[0].down_bytes
        return {
            "model": self.config.model.name,
            "batches_a_round": self.batches,
            "batch_tokens": self.tokens,
            "chunk": self.chunk,
            "bytes_a_tensor": self.tensor(self.config.split.activation_codec),
            "ways": [{**asdict(row), "times_lora": (row.up_bytes + row.down_bytes) / lora} for row in rows],
            "recommendation": self.recommend(rows),
            "says": SAYS,
        }


def lines(report: dict[str, Any]) -> list[str]:
    """Return a report as a table for people."""
    head = f"{'way':<24}{'up a round':>12}{'down':>12}{'x LoRA':>9}{'site memory':>13}{'transfer':>10}  labels  fits"
    found = [
        f"{report['model']}: {report['batches_a_round']} batches a round of {report['batch_tokens']} tokens at most, "
        f"chunks of {report['chunk']}; one tensor across the cut is {units.size(report['bytes_a_tensor'])}",
        head,
    ]
    for row in report["ways"]:
        fits = "?" if row["fits"] is None else ("yes" if row["fits"] else "no")
        found.append(
            f"{row['way']:<24}{units.size(row['up_bytes']):>12}{units.size(row['down_bytes']):>12}"
            f"{row['times_lora']:>9,.1f}{units.size(row['memory_bytes']):>13}{units.duration(row['seconds']):>10}"
            f"  {'leave' if row['labels_leave'] else 'stay':<6}  {fits}"
        )
    return [*found, "", f"Recommended: {report['recommendation']}.", report["says"]]


def parse_bytes(text: str) -> float:
    """Return the bytes of '8G', '512M', '6e9' or ''; raises ValueError for anything else."""
    plain = text.strip().upper().removesuffix("B").removesuffix("I")
    scale = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(plain[-1:], 0.0)
    return float(plain[:-1]) * scale if scale else float(plain or 0.0)


def plan_split(
    recipe: Any,
    overrides: list[str] | None,
    *,
    link_mbit: float,
    latency_ms: float,
    device_memory: str,
    as_json: bool,
    say: Any,
) -> int:
    """Print the comparison for a recipe."""
    config = resolve(recipe, overrides or [])
    plan = SplitPlan(
        config, link_mbit=link_mbit, latency_ms=latency_ms, device_bytes=parse_bytes(device_memory)
    )
    report = plan.report()
    say(json.dumps(report) if as_json else "\n".join(lines(report)))
    return 0
