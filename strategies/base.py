"""What a method is: a Flower `Strategy` whose aggregation never sees a message.

A method gets the global state and an iterator of validated updates, one decoded at a time, in canonical site
order, and returns the next state. The round engine (`server_app.rounds`) calls `directives` and `aggregate`
directly. Flower's five methods are kept on top of the same two, so that a Flower user finds what he knows and can
call a method from a ServerApp of his own; `start()` remains Flower's.

A method that keeps state beyond the global one returns it from `state_dict`: that is all a resume needs.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

import compression
from compression import Layout
from compression.flower import array_to_frame, frame_to_array
from umbel.config import Config
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

log = logging.getLogger("umbel.strategy")


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


@dataclass(frozen=True)
class Capabilities:
    """What a method can live with; `check` turns a needed False into an error in words."""

    heterogeneous_rank: bool = False
    secure_sums: bool = False
    dp_linear: bool = False
    moves_base: bool = False
    safe_4bit: bool = True
    stale_updates: bool = True
    joiner_needs: str = "the current state"


class UmbelStrategy(Strategy):
    """Base of all methods. `layout` names the exchanged tensors; `scales` maps an adapted module to its scale."""

    name = "base"
    capabilities = Capabilities()

    def __init__(self, config: Config, layout: Layout, scales: Mapping[str, float] | None = None) -> None:
        self.config, self.layout, self.scales = config, layout, dict(scales or {})
        self.check(config)

    def check(self, config: Config) -> None:
        """Raise ConfigError when the configuration is wrong for this method."""

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
        """Return the method's own state as arrays; empty for a method without memory."""
        return {}

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""

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
