"""Collecting a round: each reply is validated before it is kept; a bad one is dropped and named.

Nothing a site sends raises out of here, and every wait has a bound: the policy of the round (`server_app.policy`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Message

import compression
from compression.flower import array_to_frame
from server_app import streamed
from server_app.context import Context
from server_app.downlink import held_in
from server_app.mailbox import Delivery, Parcel
from server_app.opened import Ask, OpenRound
from server_app.policy import Verdict
from server_app.signed import check_signed
from server_app.sites import Site
from server_app.spool import Entry
from server_app.validate import (
    Rejected,
    check_header,
    check_norm,
    check_weight,
    decode_update,
    read_heldout,
    read_metrics,
    update_norm,
)
from strategies import Order
from strategies.outer.weights import weight_of
from umbel.digest import state_crc
from umbel.errors import RefusalKind
from umbel.messages import FRAME_RECORD, MessageError, Reply, control_of, from_record
from umbel.split_bundle import FRAMES

log = logging.getLogger("umbel.server")


class Collector:
    """Takes deliveries into an open round until its policy has a verdict."""

    def __init__(self, ctx: Context, *, send_on: Callable[..., list[Delivery]] | None = None) -> None:
        # `send_on(opened, site, frame)` answers a site in the middle of its round (split runs only).
        self.ctx, self._send_on = ctx, send_on

    def collect(self, opened: OpenRound) -> Verdict:
        """Wait for replies until the policy says commit or skip."""
        first = True
        while True:
            for delivery in self.ctx.mailbox.poll(lambda parcel: isinstance(parcel.tag, Ask)):
                self._take(opened, delivery)
                # The reply must not live on in this variable while the next one is taken over.
                del delivery
                if first and opened.spool.entries:
                    self.ctx.fault("first_reply", opened.index)
                    first = False
            self._bury(opened)
            # A node that connects in mid-round is asked who it is now, so that it can take part in the next one.
            self.ctx.joining.ask_new(self.ctx.joining.online(), self.ctx.config.clients.start_timeout_seconds)
            self.ctx.joining.collect()
            now = self.ctx.now()
            if opened.quorum_at is None and opened.accepted >= opened.policy.quorum:
                opened.quorum_at = now
            verdict = opened.policy.decide(
                elapsed_seconds=now - opened.began,
                asked=len(opened.asked),
                answered=len(opened.answered),
                accepted=opened.accepted,
                since_quorum_seconds=None if opened.quorum_at is None else now - opened.quorum_at,
            )
            if verdict is not Verdict.WAIT:
                return verdict
            self.ctx.sleep(self.ctx.poll_seconds)

    def _take(self, opened: OpenRound, delivery: Delivery) -> None:
        """Put one delivery where it belongs: accepted, rejected, failed or late."""
        ask: Ask = delivery.parcel.tag
        is_late = ask.expected.round != opened.index or ask.expected.attempt != opened.attempt
        self.ctx.registry.heard(delivery.parcel.site)
        if delivery.message is None:
            if not is_late:
                self.fail(opened, delivery)
            return
        site = delivery.parcel.site
        try:
            reply = from_record(Reply, control_of(delivery.message.content))
            check_header(reply, ask.expected)
            if not is_late:
                # Whoever answers with this base has read it, durably.
                self.ctx.registry.sites[site].held = opened.sent[site].digest
            if is_late:
                self._take_late(opened, ask, reply, delivery.message)
            elif self.ctx.split is not None and reply.payload == FRAMES:
                self._go_on(opened, reply, delivery.message)
            else:
                opened.answered.add(site)
                self._accept(opened, reply, delivery.message, opened.sent[site].order)
        except MessageError as error:
            self._reject(opened, site, Rejected("header", str(error)), is_late, ask.expected.round)
        except Rejected as rejected:
            if rejected.kind == RefusalKind.GAP:
                self.ctx.registry.sites[site].held = held_in(rejected.reason)
            self._reject(opened, site, rejected, is_late, ask.expected.round)

    def _accept(self, opened: OpenRound, reply: Reply, message: Message, order: Order) -> None:
        site = self.ctx.registry.sites[reply.site]
        metrics = read_metrics(reply)
        sums = read_heldout(metrics)
        if sums:
            opened.heldout[reply.site] = sums
        weight = check_weight(reply, self._max_weight(site))
        if self.ctx.config.clients.weighting != "tokens":
            weight = weight_of(self.ctx.config.clients.weighting, weight, reply.steps)
        frame = frame_of(message)
        check_signed(reply, frame, site.facts.get("key"))
        sent_bytes = len(frame)
        if self.ctx.split is not None:
            frame, order = self.ctx.split.join(reply, frame, order, self.ctx.standing.state)
        up = self.ctx.config.compression.up
        if streamed.applies(self.ctx.config, self.ctx.standing.state, self.ctx.strategy.outer):
            norm, crc = streamed.inspect(frame, order.up_layout, up)
        else:
            arrays = decode_update(frame, order.up_layout, up, order.known)
            norm, crc = update_norm(*self.ctx.strategy.measured(arrays, order)), state_crc(arrays)
        check_norm(norm, self.ctx.standing.norms, self.ctx.config.clients.max_norm_ratio)
        entry = Entry(reply, weight, norm, len(frame), crc, order=order)
        opened.spool.add(reply.site, entry, frame)
        # What is kept of a joined pair is larger than what came.
        entry.num_bytes = sent_bytes
        self.ctx.standing.doubtful.discard(reply.site)
        self.ctx.standing.arrivals.append(self.ctx.now() - opened.began)
        self.ctx.event(
            "update_accepted",
            round=opened.index,
            attempt=opened.attempt,
            site=reply.site,
            weight=weight,
            norm=norm,
            crc=entry.crc,
            tokens=reply.tokens,
            steps=reply.steps,
            loss=reply.loss,
            bytes=sent_bytes,
            seconds=metrics.get("seconds"),
            partial=reply.partial,
            late=False,
            peak_memory_bytes=metrics.get("peak_memory_bytes"),
            precision=metrics.get("precision"),
            state_found=metrics.get("state_found"),
            residual_ratio=metrics.get("residual_ratio"),
            heldout=sums,
        )

    def _max_weight(self, site: Site) -> float | None:
        """Return the most target tokens a round of this site can hold; a larger claim is capped."""
        t, d = self.ctx.config.train, self.ctx.config.data
        accumulation = t.accumulation if self.ctx.split is None else self.ctx.config.split.chunk
        return float(t.local_steps * t.batch_size * accumulation * d.max_length)

    def _take_late(self, opened: OpenRound, ask: Ask, reply: Reply, message: Message) -> None:
        """Use an update of an earlier round with a smaller weight, or drop it: by configuration."""
        c = self.ctx.config.clients
        age = opened.index - ask.expected.round
        if c.late != "weight" or age > c.late_rounds or age < 1 or ask.order is None:
            raise Rejected("late", f"arrived {age} rounds after its own", strike=False)
        layout, sent = ask.order.up_layout, frame_of(message)
        check_signed(reply, sent, self.ctx.registry.sites[reply.site].facts.get("key"))
        arrays = decode_update(sent, layout, self.ctx.config.compression.up, ask.order.known)
        norm = update_norm(*self.ctx.strategy.measured(arrays, ask.order))
        check_norm(norm, self.ctx.standing.norms, c.max_norm_ratio)
        weight = check_weight(reply, None) if c.weighting == "tokens" else 1.0
        weight *= (1.0 + age) ** -c.staleness_exponent
        moved = rebase(arrays, ask.order.known, self.ctx.standing.state)
        crc = state_crc(moved)
        frame = compression.encode(moved, layout, "exact", round_index=opened.index)
        key = f"{reply.site}\x00late-{ask.expected.round:06d}"
        opened.spool.add(key, Entry(reply, weight, norm, len(frame), crc, late=True, order=ask.order), frame)
        self.ctx.event(
            "update_accepted",
            round=opened.index,
            attempt=opened.attempt,
            site=reply.site,
            weight=weight,
            norm=norm,
            crc=crc,
            tokens=reply.tokens,
            steps=reply.steps,
            loss=reply.loss,
            bytes=len(frame),
            partial=reply.partial,
            late=True,
            of_round=ask.expected.round,
        )

    def _reject(self, opened: OpenRound, site: str, rejected: Rejected, is_late: bool, of_round: int) -> None:
        self.ctx.standing.doubtful.add(site)
        if not is_late:
            opened.answered.add(site)
            opened.rejected.append({"site": site, "kind": rejected.kind, "reason": rejected.reason})
        until = 0
        if rejected.strike and not is_late:
            until = self.ctx.registry.strike(site, opened.index)
        self.ctx.event(
            "update_rejected",
            round=of_round,
            attempt=None if is_late else opened.attempt,
            site=site,
            kind=rejected.kind,
            reason=rejected.reason,
            late=is_late,
            quarantined_until=until or None,
        )
        log.warning(
            "round %d: site %s: %s%s",
            of_round,
            site,
            rejected,
            f"; quarantined until round {until}" if until else "",
        )

    def _go_on(self, opened: OpenRound, reply: Reply, message: Message) -> None:
        """Answer a site that needs the server in the middle of its round."""
        answers = self.ctx.split.advance(reply, frame_of(message))
        assert self._send_on is not None
        for delivery in self._send_on(opened, self.ctx.registry.sites[reply.site], answers):
            self.fail(opened, delivery)

    def _bury(self, opened: OpenRound) -> None:
        """Fail the sites of a split round whose stream is gone for good, without waiting for Flower to notice."""
        for site, reason in self.ctx.split.dead() if self.ctx.split is not None else []:
            if site in opened.answered:
                continue
            self._forget(site)
            rescued = self.ctx.split.rescue(site, opened.sent[site].order, self.ctx.standing.state)
            if rescued is None:
                self.fail(opened, Delivery(Parcel("", site, 0, None), None, reason))
            else:
                opened.answered.add(site)
                self._rescue(opened, site, rescued, reason)

    def _forget(self, site: str) -> None:
        """Ask no more for what one site was sent this round for."""
        self.ctx.mailbox.forget(lambda parcel: isinstance(parcel.tag, Ask) and parcel.site == site)

    def _rescue(self, opened: OpenRound, site: str, rescued: Any, reason: str) -> None:
        """Count a dead site with the chunks that it had saved: what is saved was checked as an update is."""
        reply = Reply(
            run=self.ctx.run,
            round=opened.index,
            attempt=opened.attempt,
            base=opened.sent[site].base,
            site=site,
            weight=float(rescued.tokens),
            tokens=rescued.tokens,
            steps=rescued.chunks,
            loss=rescued.loss,
            partial=True,
        )
        try:
            arrays = decode_update(rescued.frame, rescued.order.up_layout, "exact", rescued.order.known)
            norm = update_norm(*self.ctx.strategy.measured(arrays, rescued.order))
            check_norm(norm, self.ctx.standing.norms, self.ctx.config.clients.max_norm_ratio)
        except Rejected as rejected:
            self._reject(opened, site, rejected, False, opened.index)
            return
        weight = 1.0 if self.ctx.config.clients.weighting == "uniform" else reply.weight
        entry = Entry(reply, weight, norm, 0, state_crc(arrays), order=rescued.order)
        opened.spool.add(site, entry, rescued.frame)
        self.ctx.standing.doubtful.add(site)
        self.ctx.event(
            "update_accepted",
            round=opened.index,
            attempt=opened.attempt,
            site=site,
            weight=weight,
            norm=norm,
            crc=entry.crc,
            tokens=reply.tokens,
            steps=reply.steps,
            loss=reply.loss,
            bytes=0,
            partial=True,
            late=False,
            rescued=reason,
        )
        log.warning(
            "round %d: site %s: %s; its first %d chunks count", opened.index, site, reason, reply.steps
        )

    def fail(self, opened: OpenRound, delivery: Delivery) -> None:
        """Note that a site did not get or did not answer its message."""
        site = delivery.parcel.site
        self.ctx.standing.doubtful.add(site)
        opened.answered.add(site)
        opened.rejected.append({"site": site, "kind": "failed", "reason": delivery.failure})
        self.ctx.event("site_failed", round=opened.index, site=site, kind="failed", reason=delivery.failure)
        log.warning("round %d: site %s: %s", opened.index, site, delivery.failure)


def frame_of(message: Message) -> bytes:
    """Return the one frame of an update; raises Rejected when there is none, several or another array."""
    records = message.content.array_records
    if list(records) != [FRAME_RECORD] or list(records[FRAME_RECORD]) != ["frame"]:
        raise Rejected(
            "layout", f"the update must hold one frame, it holds the records {sorted(records)[:3]}"
        )
    try:
        return array_to_frame(records[FRAME_RECORD]["frame"])
    except (ValueError, TypeError) as error:
        raise Rejected("layout", str(error)) from error
    finally:
        # Flower's records refer to themselves: a message lives until some later garbage collection, its bytes need not.
        records[FRAME_RECORD].clear()


def rebase(
    arrays: Mapping[str, np.ndarray], old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return `new + (arrays - old)`: what a late site would hold had it started from the present state."""
    moved = {}
    for name, value in arrays.items():
        if value.dtype.kind in "iub":
            moved[name] = value
            continue
        change = value.astype(np.float64) - old[name].astype(np.float64)
        moved[name] = (new[name].astype(np.float64) + change).astype(value.dtype)
    return moved
