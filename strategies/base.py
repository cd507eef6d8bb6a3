"""What a method is: a Flower `Strategy` whose aggregation never sees a message.

A method gets the global state and an iterator of validated updates, one decoded at a time, in canonical site
order, and returns the next state. The round engine (`server_app.rounds`) calls `directives` and `aggregate`
directly. Flower's five methods are kept on top of the same two, so that a Flower user finds what he knows and can
call a method from a ServerApp of his own; `start()` remains Flower's.

What a site gets and gives may differ from site to site and from what the server keeps: `orders` turns the global
state into one `Order` a site (arrays down, layout up, and an `Exchange` that tells the site what they are).

A method that keeps state beyond the global one returns it from `state_dict`: that is all a resume needs.
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

import compression
from compression import Layout
from compression.flower import array_to_frame, frame_to_array
from compression.layout import DTYPES
from compression.roles import role_for
from strategies import server_optimizer
from strategies.aggregation.rules.capabilities import Capabilities, Needs
from strategies.aggregation.rules.capabilities import check as check_needs
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.exchange import SUFFIXES, A, B, Exchange
from umbel.messages import (
    CONTROL_RECORD,
    EVALUATE,
    FRAME_RECORD,
    STATUS_OK,
    TRAIN,
    MessageError,
    Reply,
    control_of,
    from_record,
    parse_json,
)
from umbel.models.lora import LoraSettings, scale_of

log = logging.getLogger("umbel.strategy")

# Methods whose maths knows no adapter: they serve whole models too.
WHOLE_MODEL = ("fedavg", "sparseloco", "delayed")


@dataclass(frozen=True)
class SiteUpdate:
    """One accepted update. `arrays` hold the site's trained values (not deltas); `weight` > 0 is not normalised."""

    site: str
    weight: float
    arrays: Mapping[str, np.ndarray]
    tokens: int = 0
    steps: int = 0


@dataclass
class Outcome:
    """The next global state and what is worth recording about how it was made."""

    state: dict[str, np.ndarray]
    metrics: dict[str, Any] = field(default_factory=dict)


class Seat(NamedTuple):
    """One site's place in a round. `rank` is what the site itself asks for, 0 for nothing; `returning` tells that its
    update is in the last commit, so that it still has what was frozen then."""

    name: str
    position: int = 0
    cohort: int = 1
    rank: int = 0
    returning: bool = False


class AdapterLayer(NamedTuple):
    """An adapted layer as the state shows it."""

    name: str
    in_features: int
    out_features: int
    rank: int


@dataclass(frozen=True)
class Order:
    """What one site starts from and what it sends back.

    `down` travels; `known` is all the server knows of the site's start, on the wire or not, and has a value for
    every tensor that comes up (zero for one without a past). `scales` are those of
    the site's own rank.
    """

    exchange: Exchange
    down: Mapping[str, np.ndarray]
    known: Mapping[str, np.ndarray]
    down_layout: Layout
    up_layout: Layout
    scales: Mapping[str, float]


class UmbelStrategy(Strategy):
    """Base of all methods. `layout` names the exchanged tensors; `scales` maps an adapted module to its scale."""

    name = "base"
    capabilities = Capabilities()

    def __init__(self, config: Config, layout: Layout, scales: Mapping[str, float] | None = None) -> None:
        self.config, self.layout, self.scales = config, layout, dict(scales or {})
        self.modules = adapter_layers(layout) if self.scales else []
        # What each site of the round in progress was sent for.
        self.given: dict[str, Order] = {}
        self.check(config)
        self.outer = server_optimizer.build(config)

    def check(self, config: Config) -> None:
        """Raise ConfigError when the configuration is wrong for this method, naming what to use instead."""
        name = config.run.method
        needs = Needs(
            heterogeneous_rank=bool(config.lora.site_ranks),
            quantised_base=config.model.quantization != "none",
            stale_updates=config.clients.late == "weight",
        )
        check_needs(name, self.capabilities, needs)
        if config.train.mode != "lora" and name not in WHOLE_MODEL:
            raise ConfigError(
                "run.method",
                "averages adapters and needs train.mode = 'lora'",
                got=name,
                allowed=f"{', '.join(map(repr, WHOLE_MODEL))} for full training",
            )
        if config.telemetry.keep_updates and name not in ("fedavg", "fedit"):
            raise ConfigError(
                "telemetry.keep-updates",
                f"is made for methods whose sites all send the whole adapter, not for {name}",
                got=True,
                allowed="false",
                remedy="Use run.method = 'fedit' with it.",
            )
        server_optimizer.check(config, self.capabilities)

    def initial(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the first global state of a run, given the first adapter (or full model)."""
        return dict(state)

    def exchange(self, seat: Seat, commits: int) -> Exchange:
        """Return what a site receives, trains and sends after `commits` committed rounds."""
        return Exchange()

    def audience(self, seat: Seat, commits: int) -> Hashable:
        """Return what tells apart two sites that must not share one frame; equal exchanges share by default."""
        return None

    def serve(self, state: Mapping[str, np.ndarray], seat: Seat, exchange: Exchange) -> dict[str, np.ndarray]:
        """Return the arrays that travel to a site."""
        return exchange.down.pick(state, self.modules)

    def known(
        self, state: Mapping[str, np.ndarray], down: Mapping[str, np.ndarray], exchange: Exchange
    ) -> Mapping[str, np.ndarray]:
        """Return what the server knows of a site's start: what travels, and what the site draws or has by itself."""
        hidden = {
            m.name + SUFFIXES[f]: state[m.name + SUFFIXES[f]]
            for m in self.modules
            for f in exchange.seeded + exchange.stored
        }
        return {**down, **hidden}

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """Return every site's order; sites of one audience share one object, so that a frame is made once."""
        made: dict[Hashable, Order] = {}
        found = {}
        for seat in seats:
            exchange = self.exchange(seat, commits)
            key = (json.dumps(exchange.to_dict(), sort_keys=True), self.audience(seat, commits))
            if key not in made:
                made[key] = self._order(state, seat, exchange)
            found[seat.name] = made[key]
        if training:
            self.given = found
        return found

    def _order(self, state: Mapping[str, np.ndarray], seat: Seat, exchange: Exchange) -> Order:
        if exchange == Exchange():
            return Order(exchange, state, state, self.layout, self.layout, self.scales)
        down = self.serve(state, seat, exchange)
        up = exchange.up.tensors(self.modules, self.dtype)
        # A change is taken against this; what has no past is compared with nothing.
        known = {**up, **self.known(state, down, exchange)}
        return Order(
            exchange,
            down,
            known,
            Layout.from_arrays(down, role_for),
            Layout.from_arrays(up, role_for),
            self.scales_at(exchange.down.rank or exchange.up.rank),
        )

    @property
    def dtype(self) -> np.dtype:
        """The adapter's dtype."""
        return np.dtype(DTYPES[self.layout.entries[0].dtype])

    def scales_at(self, rank: int) -> dict[str, float]:
        """Return every layer's scale for a site of this rank (0: the run's own)."""
        if not rank:
            return self.scales
        lora = self.config.lora
        settings = LoraSettings(
            rank=rank, alpha=lora.alpha, rslora=lora.rslora, alpha_pattern=lora.alpha_pattern
        )
        return {m.name: scale_of(settings, m.name) for m in self.modules}

    def measured(
        self, update: Mapping[str, np.ndarray], order: Order
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Mapping[str, float]]:
        """Return (new, old, scales) of which the norm of an update is taken.

        Factors are completed to pairs where the server knows the partner; what has none is compared as it is.
        """
        whole = {**order.known, **update}
        pairs = {m: (m + A, m + B) for m in order.scales if m + A in whole and m + B in whole}
        paired = bool(pairs) and any(n.endswith((A, B)) for n in update)
        new = {n: whole[n] for pair in pairs.values() for n in pair} if paired else {}
        new.update(update)
        old = {n: order.known.get(n, np.zeros_like(a)) for n, a in new.items()}
        return new, old, order.scales if paired else {}

    def directives(self, commits: int) -> dict[str, Any]:
        """Return what a site must obey this round besides its configuration.

        `commits` is the number of committed rounds: the learning rate stands at their position.
        """
        steps = self.config.train.local_steps
        return {
            "first_step": commits * steps,
            "total_steps": self.config.run.rounds * steps,
            "local_steps": steps,
        }

    @abstractmethod
    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Return the next state. `updates` is lazy, in canonical order and read once.

        `expected_weight` is the weight the whole cohort would have had, for `normalise = "fixed"`.
        """

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the method's own state as arrays: the server optimiser's; empty for a method without memory."""
        return self.outer.state_dict() if self.outer else {}

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""
        if self.outer:
            self.outer.load_state_dict(arrays)

    def stepped(
        self, state: Mapping[str, np.ndarray], average: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the state after the server optimiser moved it towards `average`; names left out keep their value."""
        if self.outer is None:
            return {**state, **average}
        moved = {name: np.array(state[name], order="C") for name in average}
        self.outer.step(moved, average)
        return {**state, **moved}

    # Flower's five methods, over the two above.

    def pack(self, state: Mapping[str, np.ndarray]) -> ArrayRecord:
        """Return a state as the ArrayRecord that travels: one frame."""
        return ArrayRecord(
            {"frame": frame_to_array(compression.encode(state, self.layout, self.config.compression.down))}
        )

    def unpack(self, record: ArrayRecord) -> dict[str, np.ndarray]:
        """Return the state held by a record made with `pack`."""
        return compression.decode(array_to_frame(record["frame"]), self.layout)

    def _to_all(self, kind: str, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        return [
            Message(RecordDict({FRAME_RECORD: arrays, CONTROL_RECORD: config}), node, kind)
            for node in sorted(grid.get_node_ids())
        ]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one train message for each node of `grid`; `config` is an Instruction's record."""
        return self._to_all(TRAIN, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one evaluate message for each node of `grid`."""
        return self._to_all(EVALUATE, arrays, config, grid)

    def _replies(self, replies: Iterable[Message]) -> Iterator[tuple[Reply, Message]]:
        """Yield the good replies in canonical site order; what is not one is logged and left out."""
        good = []
        for message in replies:
            if message.has_error():
                log.warning("a site failed: %s", message.error.reason)
                continue
            try:
                reply = from_record(Reply, control_of(message.content))
            except MessageError as error:
                log.warning("a reply was refused: %s", error)
                continue
            if reply.status == STATUS_OK:
                good.append((reply, message))
            else:
                log.warning("site %s: %s: %s", reply.site, reply.status, reply.reason)
        yield from sorted(good, key=lambda pair: pair[0].site)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next state as a frame and the loss, or (None, None) when no reply was usable."""
        pairs = list(self._replies(replies))
        if not pairs:
            return None, None
        updates = (
            SiteUpdate(
                reply.site,
                reply.weight,
                compression.decode(array_to_frame(message.content[FRAME_RECORD]["frame"]), self.layout),
                reply.tokens,
                reply.steps,
            )
            for reply, message in pairs
        )
        first = compression.decode(array_to_frame(pairs[0][1].content[FRAME_RECORD]["frame"]), self.layout)
        outcome = self.aggregate(first, updates)
        tokens = sum(reply.tokens for reply, _ in pairs)
        loss = sum(reply.loss * reply.tokens for reply, _ in pairs) / max(1, tokens)
        return self.pack(outcome.state), MetricRecord({"loss": float(loss), "tokens": int(tokens)})

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return loss and token accuracy over all held-out tokens, or None."""
        sums = [parse_json(reply.metrics, "metrics").get("heldout") for reply, _ in self._replies(replies)]
        sums = [s for s in sums if s and s["tokens"]]
        tokens = sum(s["tokens"] for s in sums)
        if not tokens:
            return None
        return MetricRecord(
            {
                "loss": float(sum(s["loss_sum"] for s in sums) / tokens),
                "token_accuracy": float(sum(s["correct"] for s in sums) / tokens),
                "tokens": int(tokens),
            }
        )

    def summary(self) -> None:
        """Log what this method exchanges."""
        log.info("%s: %d tensors, %d numbers", self.name, len(self.layout.entries), self.layout.numel)


def adapter_layers(layout: Layout) -> list[AdapterLayer]:
    """Return the adapted layers of an adapter's layout, sorted by name."""
    shapes = {e.name: e.shape for e in layout.entries}
    found = []
    for name, (rank, inp) in ((n, s) for n, s in shapes.items() if n.endswith(A)):
        module = name.removesuffix(A)
        found.append(AdapterLayer(module, inp, shapes[module + B][0], rank))
    return sorted(found)
