"""Scoring the present state on the held-out rows of every site that is there."""

from __future__ import annotations

import logging
from typing import Any

from server_app.context import Context
from server_app.dispatch import Dispatcher
from server_app.heldout import combine
from server_app.mailbox import Delivery
from server_app.validate import read_heldout, read_metrics
from umbel.messages import EVALUATE, STATUS_OK, MessageError, Reply, control_of, from_record

log = logging.getLogger("umbel.server")


def evaluate_sites(ctx: Context, dispatcher: Dispatcher) -> dict[str, Any] | None:
    """Return the loss over all held-out tokens of all sites; None when nobody answered before the deadline."""
    began, limit = ctx.now(), ctx.config.clients.deadline_seconds
    sites = ctx.registry.available(ctx.joining.online(), 10**9, ctx.operator.orders)
    sent, failed = dispatcher.send_evaluation(sites)
    waiting = {site.name for site in sites} - {f.parcel.site for f in failed}
    found: dict[str, dict[str, float]] = {}
    while waiting and ctx.now() - began < limit:
        for delivery in ctx.mailbox.poll(lambda parcel: parcel.tag == EVALUATE):
            waiting.discard(delivery.parcel.site)
            sums = read_evaluation(delivery, sent[delivery.parcel.site].base)
            if sums:
                found[delivery.parcel.site] = sums
        if waiting:
            ctx.sleep(ctx.poll_seconds)
    ctx.mailbox.forget(lambda parcel: parcel.tag == EVALUATE)
    return combine(found)


def read_evaluation(delivery: Delivery, base: str) -> dict[str, float] | None:
    """Return the sums of one reply, None for a failed, refused or foreign one."""
    if delivery.message is None:
        log.warning("evaluation at site %s: %s", delivery.parcel.site, delivery.failure)
        return None
    try:
        reply = from_record(Reply, control_of(delivery.message.content))
    except MessageError as error:
        log.warning("evaluation at site %s: %s", delivery.parcel.site, error)
        return None
    if reply.status != STATUS_OK:
        log.warning("evaluation at site %s: %s: %s", reply.site, reply.status, reply.reason)
    if reply.base != base or reply.site != delivery.parcel.site:
        return None
    return read_heldout(read_metrics(reply))
