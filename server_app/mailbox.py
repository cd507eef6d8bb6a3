"""Messages in flight: who was sent what, and replies pulled one id at a time.

Flower's own facts make this necessary (measured on 1.42): an error reply made by the SuperLink does not name its
node; a refused message has an empty id; and a pull of a reply that is only half uploaded blocks for minutes, with
complete replies waiting behind it. So the map message -> site is ours, and on a real grid each pull runs in a
thread of its own: one that hangs holds up nobody.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from server_app.traffic import DOWN, UP, Traffic

# Pulls that may run at once; one hung upload takes one of them until Flower gives it up (180 s).
PULL_THREADS = 8

# Flower's error codes in words (flwr.common.constant.ErrorCode).
ERROR_WORDS = {
    1: "the site could not load the app",
    2: "the site's app raised an error",
    3: "the message was lost or expired before the site took it",
    4: "the site's reply was lost before it was complete",
    5: "the site is offline",
    6: "a condition of the site's message filters failed",
    7: "the site refused the app bundle",
    8: "the site's app process died",
}


@dataclass(frozen=True)
class Parcel:
    """One message in flight."""

    message_id: str
    site: str
    node: int
    tag: Any


@dataclass(frozen=True)
class Delivery:
    """What came back for a parcel: a message, or the reason in words why there is none."""

    parcel: Parcel
    message: Message | None
    failure: str = ""


class Mailbox:
    """Sends messages and collects their replies without ever blocking on one of them.

    `threaded=False` pulls in the caller's thread: for grids in memory, where a reply is whole or absent.
    """

    def __init__(self, grid: Grid, *, threaded: bool = True) -> None:
        self._grid = grid
        self._threaded = threaded
        self.traffic = Traffic()
        self._open: dict[str, Parcel] = {}
        self._pulling: set[str] = set()
        self._results: queue.Queue[tuple[str, Message | None, str]] = queue.Queue()
        # Pulled but not handed out yet: whoever polls gets only what he asked for, the rest waits here.
        self._arrived: list[Delivery] = []

    @property
    def in_flight(self) -> list[Parcel]:
        """Parcels without a reply yet."""
        return list(self._open.values())

    def send(self, items: Sequence[tuple[str, int, Any, Message]]) -> list[Delivery]:
        """Send (site, node, tag, message) items; returns those that failed at once."""
        failed = []
        for site, node, tag, message in items:
            try:
                ids = list(self._grid.push_messages([message]))
                message_id, reason = (ids[0] if ids else ""), ""
            except Exception as error:
                message_id, reason = "", f"{type(error).__name__}: {error}"
            parcel = Parcel(message_id or "", site, node, tag)
            if message_id:
                self._open[message_id] = parcel
                self.traffic.count(node, DOWN, message)
            else:
                failed.append(
                    Delivery(parcel, None, reason or "the site left before the message could be sent")
                )
        return failed

    def poll(self, wanted: Callable[[Parcel], bool] = lambda parcel: True) -> Iterator[Delivery]:
        """Yield what has arrived for parcels in flight; never waits for one that has not.

        Replies are taken over one at a time, as the caller comes to them, so that those of many sites never lie in
        memory together.
        """
        for message_id, parcel in list(self._open.items()):
            if message_id in self._pulling or message_id not in self._open or not wanted(parcel):
                continue
            if not self._threaded:
                self._pull(message_id)
                yield from self._hand_out(wanted)
            elif len(self._pulling) < PULL_THREADS:
                self._pulling.add(message_id)
                threading.Thread(
                    target=self._pull, args=(message_id,), daemon=True, name="umbel-pull"
                ).start()
        yield from self._hand_out(wanted)

    def _hand_out(self, wanted: Callable[[Parcel], bool]) -> Iterator[Delivery]:
        self._sort_in()
        found = [delivery for delivery in self._arrived if wanted(delivery.parcel)]
        self._arrived = [delivery for delivery in self._arrived if not wanted(delivery.parcel)]
        while found:
            yield found.pop(0)

    def _sort_in(self) -> None:
        """Move finished pulls to `_arrived`; an empty pull only frees its place."""
        while True:
            try:
                message_id, message, failure = self._results.get_nowait()
            except queue.Empty:
                return
            self._pulling.discard(message_id)
            known = self._open.get(message_id)
            if known is None or (message is None and not failure):
                continue
            del self._open[message_id]
            self._arrived.append(Delivery(known, message, failure))

    def forget(self, drop: Callable[[Parcel], bool]) -> None:
        """Stop asking for replies of parcels that `drop` selects."""
        for message_id, parcel in list(self._open.items()):
            if drop(parcel):
                del self._open[message_id]
        self._arrived = [delivery for delivery in self._arrived if not drop(delivery.parcel)]

    def _pull(self, message_id: str) -> None:
        message, failure = None, ""
        try:
            replies = list(self._grid.pull_messages([message_id]))
            if replies:
                message = replies[0]
                if message.has_error():
                    code = message.error.code
                    words = ERROR_WORDS.get(code, "unknown error")
                    detail = " ".join((message.error.reason or "").split())[:300]
                    message, failure = None, f"{words} (code {code}){': ' + detail if detail else ''}"
                else:
                    self.traffic.count(message.metadata.src_node_id, UP, message)
        except Exception as error:
            # A broken connection is not a reply: ask again at the next poll, the deadline bounds it.
            if self._threaded:
                message, failure = None, ""
            else:
                failure = f"{type(error).__name__}: {error}"
        self._results.put((message_id, message, failure))
