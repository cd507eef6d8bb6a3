"""Sending a round: what each site is asked, one frame for all sites that share an order.

A frame is encoded once per order (`strategies.Order`), whatever the number of sites. Nothing is waited for here but
`before_send`: the last moment to make the round before durable, because these messages tell the sites that it counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict

import compression
from compression.flower import frame_to_array
from compression.payload import is_exact
from server_app.context import Context
from server_app.downlink import Broadcast
from server_app.mailbox import Delivery
from server_app.opened import Ask, OpenRound, Outgoing
from server_app.sites import Site
from server_app.timeouts import TRAVEL_SECONDS, TTL_MARGIN_SECONDS
from server_app.validate import Expected
from strategies import Order, Seat
from umbel.config import to_json
from umbel.digest import state_crc
from umbel.errors import ConfigError
from umbel.messages import CONTROL_RECORD, EVALUATE, FRAME_RECORD, TRAIN, Instruction, to_record
from umbel.seeds import derive_seed
from umbel.split_bundle import ADAPTER, pack_bundle


class Dispatcher:
    """Builds and sends the messages of a round and of an evaluation."""

    def __init__(self, ctx: Context, *, before_send: Callable[[], None]) -> None:
        self.ctx, self._before_send = ctx, before_send
        self._site_config = to_json(ctx.config)

    def send(self, opened: OpenRound, chosen: list[Site]) -> list[Delivery]:
        """Send the round to `chosen`; returns what could not be sent."""
        opened.sent = self._outgoing(chosen, opened.index, training=True)
        directives = self.ctx.strategy.directives(self.ctx.standing.round)
        directives["codec_seed"] = derive_seed(self.ctx.config.run.seed, "codec", opened.index)
        directives["feedback"] = self.ctx.config.compression.feedback
        # A site's own policy may ask for more sites than this in a round (`umbel.policy`).
        directives["quorum"] = opened.policy.quorum
        if self.ctx.config.privacy.clip_norm > 0:
            directives["clip_norm"] = self.ctx.config.privacy.clip_norm
        every = self.ctx.config.eval.every
        evaluate = opened.index == 1 or (every > 0 and (opened.index - 1) % every == 0)
        seconds = opened.policy.deadline_seconds
        items: list[tuple[str, int, Any, Message]] = []
        late = self.ctx.config.clients.late == "weight"
        if self.ctx.split is not None:
            names = [site.name for site in chosen]
            self.ctx.split.begin(opened.index, opened.attempt, names, self.ctx.standing.state)
        for site in chosen:
            out = opened.sent[site.name]
            order = self._instruction(
                site,
                opened.index,
                opened.attempt,
                out,
                seconds,
                evaluate=evaluate,
                directives=json.dumps(
                    {**directives, **exchange_of(out), **self._own(site, opened)}, sort_keys=True
                ),
                outcomes=json.dumps(site.outcomes),
            )
            content = RecordDict({FRAME_RECORD: self._record(site, out), CONTROL_RECORD: to_record(order)})
            message = Message(
                content, site.node, TRAIN, ttl=seconds + TTL_MARGIN_SECONDS, group_id=str(opened.index)
            )
            expected = Expected(self.ctx.run, opened.index, opened.attempt, out.base, site.name)
            items.append((site.name, site.node, Ask(expected, out.order if late else None), message))
            opened.bytes_down += len(out.frame)
        self._before_send()
        failed = self.ctx.mailbox.send(items)
        lost = {f.parcel.site for f in failed}
        for site in chosen:
            if site.name not in lost:
                size = len(opened.sent[site.name].frame)
                self.ctx.event("dispatched", round=opened.index, site=site.name, bytes=size)
        for delivery in failed:
            opened.bytes_down -= len(opened.sent[delivery.parcel.site].frame)
        return failed

    def send_on(self, opened: OpenRound, site: Site, frame: bytes) -> list[Delivery]:
        """Send a site that is in the middle of its round what it asked for; returns what could not be sent."""
        out, began = opened.sent[site.name], opened.began
        seconds = max(1.0, opened.policy.deadline_seconds - (self.ctx.now() - began))
        directives = self.ctx.strategy.directives(self.ctx.standing.round)
        directives["codec_seed"] = derive_seed(self.ctx.config.run.seed, "codec", opened.index)
        directives["feedback"] = self.ctx.config.compression.feedback
        order = self._instruction(
            site,
            opened.index,
            opened.attempt,
            out,
            seconds,
            directives=json.dumps({**directives, **self._cut(site)}, sort_keys=True),
            outcomes=json.dumps(site.outcomes),
        )
        record = ArrayRecord({"frame": frame_to_array(frame)})
        content = RecordDict({FRAME_RECORD: record, CONTROL_RECORD: to_record(order)})
        message = Message(
            content, site.node, TRAIN, ttl=seconds + TTL_MARGIN_SECONDS, group_id=str(opened.index)
        )
        expected = Expected(self.ctx.run, opened.index, opened.attempt, out.base, site.name)
        opened.bytes_down += len(frame)
        return self.ctx.mailbox.send([(site.name, site.node, Ask(expected, None), message)])

    def _record(self, site: Site, out: Outgoing) -> ArrayRecord:
        """Return what travels to one site: the frame that all share, with its own parts where a split run has some."""
        own = self.ctx.split.down(site.name) if self.ctx.split is not None else {}
        if not own:
            return out.record
        bundle = pack_bundle({ADAPTER: bytes(out.frame), **own})
        return ArrayRecord({"frame": frame_to_array(bundle)})

    def _cut(self, site: Site) -> dict[str, Any]:
        """Return what a split run's instruction says besides."""
        return {} if self.ctx.split is None else {"split": self.ctx.split.directive(site.name)}

    def _own(self, site: Site, opened: OpenRound) -> dict[str, Any]:
        """Return what one site alone is told: its part of a split model, its lease of a common corpus."""
        leases, t = self.ctx.leases, self.ctx.config.train
        if leases is None:
            return self._cut(site)
        count = t.local_steps * t.batch_size * t.accumulation
        return {**self._cut(site), "lease": leases.lend(site.name, count, rows_of(site.facts))}

    def send_evaluation(self, sites: list[Site]) -> tuple[dict[str, Outgoing], list[Delivery]]:
        """Send the present state to be scored; returns what each site was sent and what could not be sent."""
        c = self.ctx.config.clients
        sent = self._outgoing(sites, 0, training=False)
        items: list[tuple[str, int, Any, Message]] = []
        for site in sites:
            out = sent[site.name]
            directives = json.dumps(exchange_of(out), sort_keys=True)
            order = self._instruction(
                site, self.ctx.standing.round, 0, out, c.deadline_seconds, directives=directives
            )
            content = RecordDict({FRAME_RECORD: out.record, CONTROL_RECORD: to_record(order)})
            ttl = c.deadline_seconds + TTL_MARGIN_SECONDS
            message = Message(content, site.node, EVALUATE, ttl=ttl, group_id="evaluate")
            items.append((site.name, site.node, EVALUATE, message))
        return sent, self.ctx.mailbox.send(items)

    def _instruction(
        self, site: Site, index: int, attempt: int, out: Outgoing, seconds: float, **extra: Any
    ) -> Instruction:
        return Instruction(
            run=self.ctx.run,
            round=index,
            attempt=attempt,
            base=out.base,
            site=site.name,
            remaining_seconds=max(1.0, seconds - TRAVEL_SECONDS),
            up=self.ctx.config.compression.up,
            config=self._site_config,
            settled=json.dumps(list(site.settled)),
            layout=out.order.down_layout.digest(),
            **extra,
        )

    def _still_has(self, site: Site) -> bool:
        """Tell whether a site has what the last committed round froze: it took part and did not fail since."""
        return 0 < self.ctx.standing.round == site.settled[0] and site.name not in self.ctx.standing.doubtful

    def _outgoing(self, sites: list[Site], index: int, *, training: bool) -> dict[str, Outgoing]:
        """Return what each site is sent. A frame is encoded once for all sites that share an order."""
        seats = [
            Seat(s.name, position, len(sites), asked_rank(s.facts), training and self._still_has(s))
            for position, s in enumerate(sites)
        ]
        link = self.ctx.broadcast
        start = self.ctx.standing.state if link is None else link.shadow
        orders = self.ctx.strategy.orders(start, seats, self.ctx.standing.round, training=training)
        if link is not None:
            return self._changes(link, sites, orders)
        made: dict[int, Outgoing] = {}
        for order in orders.values():
            if id(order) not in made:
                self._check_lossy(order)
                base, down = state_crc(order.down), self.ctx.config.compression.down
                frame = compression.encode(order.down, order.down_layout, down, round_index=index, base=base)
                record = ArrayRecord({"frame": frame_to_array(frame)})
                made[id(order)] = Outgoing(order, base, frame, record)
        return {name: made[id(order)] for name, order in orders.items()}

    def _changes(
        self, link: Broadcast, sites: list[Site], orders: Mapping[str, Order]
    ) -> dict[str, Outgoing]:
        """Return what each site is sent where the way down is lossy: it depends on what the site holds."""
        base = state_crc(link.shadow)
        made: dict[tuple[int, str], Outgoing] = {}
        for site in sites:
            order = orders[site.name]
            key = (id(order), site.held)
            if key not in made:
                parcel = link.parcel(site.held)
                record = ArrayRecord({"frame": frame_to_array(parcel.data)})
                made[key] = Outgoing(order, base, parcel.data, record, parcel.directive, link.digest)
        return {site.name: made[id(orders[site.name]), site.held] for site in sites}

    def _check_lossy(self, order: Order) -> None:
        """Refuse a lossy codec where a site sends tensors that it was not sent: there is no change to encode."""
        unknown = [e.name for e in order.up_layout.entries if e.name not in order.known]
        if unknown and not is_exact(self.ctx.config.compression.up):
            raise ConfigError(
                "compression.up",
                f"cannot be lossy with run.method = {self.ctx.config.run.method!r}: its updates are no changes of what "
                f"was sent ({unknown[0]} and {len(unknown) - 1} more)",
                got=self.ctx.config.compression.up,
                allowed="'exact' or 'lossless'",
            )


def asked_rank(facts: Mapping[str, Any]) -> int:
    """Return the adapter rank a site asked for when it joined; 0 for none or nonsense."""
    rank = facts.get("rank")
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 < rank <= 4096 else 0


def rows_of(facts: Mapping[str, Any]) -> int:
    """Return the number of training blocks a site stated when it joined; 0 for nonsense."""
    rows = facts.get("rows_train")
    return rows if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0 else 0


def exchange_of(out: Outgoing) -> dict[str, Any]:
    """Return the directives of this frame: what a site exchanges (nothing for the plain adapter or model)."""
    exchange = {"exchange": found} if (found := out.order.exchange.to_dict()) else {}
    return {**exchange, **out.directives}
