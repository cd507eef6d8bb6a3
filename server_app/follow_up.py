"""A second, empty message behind each round's instruction, so that a SuperNode does not fall asleep.

A stock SuperNode (flwr 1.42) pulls one message, waits for its reply, pushes it and asks for the next one at once. The
server cannot have it ready so soon, so the answer is "nothing", and the node sleeps a fixed 3 s. A message that is
already there when it asks costs one start of Flower's app process (1.1 to 1.5 s) instead, and the next instruction is
there when that ends. Messages of one node are delivered in the order they were made.

    without    start + 3 s           with    start + start

Nothing depends on it: a follow-up that is lost, late or refused changes no round. Not sent in simulations, where there
is no sleep, and there two messages for one site would be worked on at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict

from server_app.context import Context
from server_app.mailbox import Parcel
from server_app.sites import Site
from server_app.timeouts import TTL_MARGIN_SECONDS
from umbel.messages import CONTROL_RECORD, FOLLOW_UP

# Rounds after which a reply to a follow-up is no longer asked for.
KEEP_ROUNDS = 3


@dataclass(frozen=True)
class FollowUp:
    """What a follow-up in flight belongs to."""

    round: int


class FollowUps:
    """Sends them with each round and clears away the replies to earlier ones."""

    def __init__(self, ctx: Context, *, enabled: bool) -> None:
        self.ctx, self.enabled = ctx, enabled

    def send(self, round_index: int, sites: Iterable[Site]) -> None:
        """Queue one behind the instruction of each site; a failure is nothing."""
        if not self.enabled:
            return
        ttl = self.ctx.config.clients.deadline_seconds + TTL_MARGIN_SECONDS
        items = []
        for site in sites:
            content = RecordDict({CONTROL_RECORD: ConfigRecord({"round": round_index})})
            message = Message(content, site.node, FOLLOW_UP, ttl=ttl, group_id=str(round_index))
            items.append((site.name, site.node, FollowUp(round_index), message))
        self.ctx.mailbox.send(items)

    def clear(self, round_index: int) -> None:
        """Take the replies to follow-ups of earlier rounds off the SuperLink and forget those that are too old."""

        def earlier(parcel: Parcel) -> bool:
            return isinstance(parcel.tag, FollowUp) and parcel.tag.round < round_index

        for _ in self.ctx.mailbox.poll(earlier):
            pass
        self.ctx.mailbox.forget(lambda p: earlier(p) and p.tag.round < round_index - KEEP_ROUNDS)
