"""The engine that waits for nobody: one arrival is one commit, and its site is sent on at once.

    each idle site that is there   is sent the present state, as round (commits + 1) with an attempt of its own
    an accepted arrival            is moved onto the present state and committed (`strategies.delayed`)
    an update older than allowed   is dropped, its site is sent on
    silence beyond the deadline    frees the site; `run.max-consecutive-skips` such losses in a row end the run

Everything around a commit (validation, checkpoint before the next message, records) is that of `server_app.rounds`. A
site's own books are kept under the round and attempt it was sent, not under the number of the commit. The states that
sites in flight started from are kept: memory grows with the number of different ones, at most the number of sites.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from server_app.collect import rebase
from server_app.mailbox import Delivery, Parcel
from server_app.opened import Ask, OpenRound
from server_app.policy import RoundPolicy
from server_app.rounds import Engine, RunAborted, SitesGone
from server_app.sites import Site
from server_app.spool import Entry
from server_app.validate import decode_update
from strategies.delayed import Delayed


class AsyncEngine(Engine):
    """Runs arrivals over the method 'delayed'."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert isinstance(self.strategy, Delayed), "settings are checked before an engine is made"
        self._rule = self.strategy
        self._flights: dict[str, OpenRound] = {}
        self._waiting: list[Delivery] = []
        # (round, attempt) under which the site of the arrival being committed keeps its books.
        self._sent_as = (0, 0)

    def run_round(self) -> dict[str, Any]:
        """Wait for the next arrival that counts, commit it and return its record."""
        losses: list[str] = []
        began = self.ctx.now()
        c = self.ctx.config
        while True:
            self._send_out()
            if not self._flights and self.ctx.now() - began >= c.clients.start_timeout_seconds:
                raise SitesGone(
                    f"commit {self.round + 1}: no site is there after {c.clients.start_timeout_seconds:g} s. "
                    f"{self.ctx.joining.reasons()} The last good state is kept."
                )
            record = self._next(losses)
            if record is not None:
                return record
            if len(losses) >= c.run.max_consecutive_skips:
                raise RunAborted(
                    f"commit {self.round + 1}: {len(losses)} sites in a row brought nothing. Last: {losses[-1]}. "
                    "The last good state is kept; mend the sites and resume with --set run.resume=auto."
                )
            if not self._waiting:
                self.ctx.sleep(self.ctx.poll_seconds)

    def _send_out(self) -> None:
        online = self.ctx.joining.online()
        self.ctx.joining.ask_new(online, self.ctx.config.clients.start_timeout_seconds)
        self.ctx.joining.collect()
        for name in sorted(self.ctx.operator.read()):
            self.registry.pardon(name)
        for site in self.registry.available(online, self.round + 1, self.ctx.operator.orders):
            if site.name not in self._flights:
                self._send(site)

    def _send(self, site: Site) -> None:
        standing, index = self.standing, self.round + 1
        attempt = standing.attempts[index] = standing.attempts.get(index, 0) + 1
        deadline = self.ctx.config.clients.deadline_seconds
        flight = OpenRound(index, attempt, RoundPolicy(1, 1, deadline, 0.0), [site.name], self.ctx.now())
        self.ctx.event(
            "round_opened",
            fsync=True,
            round=index,
            attempt=attempt,
            selected=[site.name],
            goal=1,
            quorum=1,
            deadline_seconds=deadline,
        )
        self._rule.turn = site.name
        failed = self._dispatcher.send(flight, [site])
        self.ctx.fault("dispatch", index)
        if not failed:
            self._flights[site.name] = flight

    def _next(self, losses: list[str]) -> dict[str, Any] | None:
        """Take in what arrived; return the record of a commit, None when nothing counted yet."""
        self._waiting += self.ctx.mailbox.poll(lambda parcel: isinstance(parcel.tag, Ask))
        while self._waiting:
            delivery = self._waiting.pop(0)
            flight = self._flights.get(delivery.parcel.site)
            ask: Ask = delivery.parcel.tag
            if flight is None or (flight.index, flight.attempt) != (ask.expected.round, ask.expected.attempt):
                continue
            del self._flights[delivery.parcel.site]
            record = self._taken(flight, delivery)
            if record is not None:
                return record
            losses.append(self._why(flight))
        for name, flight in list(self._flights.items()):
            if self.ctx.now() - flight.began >= flight.policy.deadline_seconds:
                del self._flights[name]
                self._note_silence([name], flight.index)
                losses.append(f"{name}: no answer in {flight.policy.deadline_seconds:.0f} s")
        return None

    def _taken(self, flight: OpenRound, delivery: Delivery) -> dict[str, Any] | None:
        self._collector._take(flight, delivery)
        # The site's books are under what it was sent; the commit has the next number.
        self._sent_as = (flight.index, flight.attempt)
        age, site = self.round - (flight.index - 1), flight.asked[0]
        if not flight.spool.entries:
            self._note_outcomes(flight, committed=False)
            flight.spool.close()
            return None
        if age > self.ctx.config.server.stale_limit:
            flight.rejected.append({"site": site, "kind": "late", "reason": f"its base is {age} commits old"})
            self.ctx.event(
                "update_rejected", round=flight.index, attempt=flight.attempt, **flight.rejected[-1]
            )
            self.registry.sites[site].note(*self._sent_as, "dropped")
            flight.spool.close()
            return None
        self._learn(flight)
        self._rule.ages = {site: age}
        flight.index = self.round + 1
        try:
            record = self._commit(flight, 0.0, self.ctx.now())
        finally:
            flight.spool.close()
        if record["outcome"] != "commit":
            return None
        self.registry.sites[site].settled = self._sent_as
        return record

    def _learn(self, flight: OpenRound) -> None:
        """Remember how fast this site is."""
        entry = flight.spool.ordered()[0]
        elapsed = max(1e-9, self.ctx.now() - flight.began)
        self._rule.speeds[flight.asked[0]] = entry.reply.steps / elapsed

    def _why(self, flight: OpenRound) -> str:
        return (
            "; ".join(f"{r['site']}: {r['kind']}: {r['reason']}" for r in flight.rejected) or flight.asked[0]
        )

    def _decoded(self, frame: bytes, entry: Entry) -> dict[str, np.ndarray]:
        order = entry.order
        values = decode_update(frame, order.up_layout, self.ctx.config.compression.up, order.known)
        return rebase(values, order.known, self.standing.state)

    def _note_outcomes(self, opened: OpenRound, *, committed: bool) -> None:
        index, attempt = opened.index, opened.attempt
        opened.index, opened.attempt = self._sent_as
        super()._note_outcomes(opened, committed=committed)
        opened.index, opened.attempt = index, attempt

    def _is_stale(self, parcel: Parcel) -> bool:
        """Tell whether a parcel belongs to no flight any more."""
        if not isinstance(parcel.tag, Ask):
            return False
        flight = self._flights.get(parcel.site)
        expected = parcel.tag.expected
        return flight is None or (flight.index, flight.attempt) != (expected.round, expected.attempt)
