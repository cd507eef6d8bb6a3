"""What happened in a run, computed from its events: the one place where numbers shown are computed.

    state s = the global state after round s; state 0 = the initial one
    held-out loss of state s   = `evaluated` of round s, else the `heldout` of the round that started from s
    contributed tokens of site = tokens of its updates that stand in the record of a committed round
    wait of a round            = total - (load + train + eval + encode), means over its updates, never < 0

A round that a crash cut off and that ran again is two rows; the later commit counts in curves and
contributions, the bytes of both were sent. A resume from round k undoes the commits after k. Odd or missing
fields read as "not known": a broken event never costs the report. It draws nothing and formats nothing.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from umbel.telemetry.events import read_events
from umbel.telemetry.records import (
    Note,
    Refused,
    RoundRow,
    Sample,
    SiteRow,
    items,
    measures,
    number,
    text,
    whole,
)

PHASES = ("load", "train", "eval", "encode", "wait")


@dataclass
class History:
    """One run: `rounds` in the order they were opened, `sites` by name, and the single facts beside them."""

    rounds: list[RoundRow] = field(default_factory=list)
    sites: dict[str, SiteRow] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    measured: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    run: str = ""
    method: str = ""
    model: str = ""
    task: str = ""
    num_rounds: int | None = None
    num_sites_expected: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    num_starts: int = 0
    started_at: float | None = None
    last_event_at: float | None = None
    last_commit_at: float | None = None
    outcome: str = "running"
    reason: str = ""
    exit_code: int | None = None
    heldout: dict[int, dict[str, Any]] = field(default_factory=dict)
    server_heldout: dict[int, dict[str, Any]] = field(default_factory=dict)
    checkpoint_round: int | None = None
    # The newest account of privacy: epsilon, delta and the number of releases; empty without privacy.
    privacy: dict[str, float] = field(default_factory=dict)
    privacy_releases: set[str] = field(default_factory=set)
    # Bytes on the wire by (site, phase, direction "up" or "down"), as `server_app.traffic` counts them.
    wire: dict[tuple[str, str, str], int] = field(default_factory=dict)

    @classmethod
    def from_events(cls, events: Iterable[Mapping[str, Any]]) -> History:
        """Return the history of these events; unknown events are ignored."""
        history = cls()
        for event in events:
            history.add(event)
        return history

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> History:
        """Return the history of an event file; an absent file is a run without events."""
        return cls.from_events(read_events(path))

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one more event, in log order."""
        self.last_event_at = number(event.get("t")) or self.last_event_at
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)
        else:
            self._measure(event)

    # What the events mean, one method an event.

    def _on_run_started(self, e: Mapping[str, Any]) -> None:
        self.num_starts += 1
        self.started_at = self.started_at or number(e.get("t"))
        for name in ("run", "method", "model", "task"):
            setattr(self, name, text(e.get(name)) or getattr(self, name))
        self.num_rounds = whole(e.get("rounds")) or self.num_rounds
        self.num_sites_expected = whole(e.get("num_sites_expected")) or self.num_sites_expected
        if isinstance(e.get("config"), Mapping):
            self.config = dict(e["config"])
        self.outcome, self.reason, self.exit_code = "running", "", None
        for row in self.rounds:
            row.interrupt()
        resumed_from = whole(e.get("resumed_from"))
        if self.num_starts > 1:
            self._note(e, f"the server started again, from the state after round {resumed_from or 0}")
        if resumed_from is not None:
            self._undo_after(resumed_from)

    def _undo_after(self, index: int) -> None:
        for row in self.rounds:
            if row.round > index and row.outcome == "commit":
                row.outcome = "undone"
        for known in (self.heldout, self.server_heldout):
            for later in [state for state in known if state > index]:
                del known[later]

    def _on_site_joined(self, e: Mapping[str, Any]) -> None:
        site = self._site(e.get("site"))
        site.joined = True
        site.node = text(e.get("node"))
        site.rows_train, site.rows_heldout = whole(e.get("rows_train")), whole(e.get("rows_heldout"))
        site.versions = dict(e["versions"]) if isinstance(e.get("versions"), Mapping) else site.versions

    def _on_site_refused(self, e: Mapping[str, Any]) -> None:
        self.refused.append(Refused(None, text(e.get("site")), "join", text(e.get("reason"))))

    def _on_round_opened(self, e: Mapping[str, Any]) -> None:
        index = whole(e.get("round")) or 0
        for row in self.rounds:
            if row.round == index:
                row.interrupt()
        self.rounds.append(
            RoundRow(
                round=index,
                attempt=whole(e.get("attempt")) or 1,
                selected=[text(s) for s in items(e.get("selected"))],
                goal=whole(e.get("goal")),
                quorum=whole(e.get("quorum")),
                deadline_seconds=number(e.get("deadline_seconds")),
                opened_at=number(e.get("t")),
            )
        )
        for name in self.rounds[-1].selected:
            self._site(name)

    def _on_dispatched(self, e: Mapping[str, Any]) -> None:
        row, size = self._row(e), whole(e.get("bytes")) or 0
        row.sent_bytes += size
        self._site(e.get("site")).bytes_down += size

    def _on_update_accepted(self, e: Mapping[str, Any]) -> None:
        row, name = self._row(e, late=bool(e.get("late"))), text(e.get("site"))
        row.updates[name] = dict(e)
        row.received_bytes += whole(e.get("bytes")) or 0
        self._site(name).take_update(e)

    def _on_update_rejected(self, e: Mapping[str, Any]) -> None:
        self._refuse(e, "rejected")

    def _on_site_failed(self, e: Mapping[str, Any]) -> None:
        self._refuse(e, "failed")

    def _refuse(self, e: Mapping[str, Any], how: str) -> None:
        index, name = whole(e.get("round")), text(e.get("site"))
        kind, reason = text(e.get("kind")) or how, text(e.get("reason"))
        self._site(name)
        self.refused.append(Refused(index, name, kind, reason))
        if index is not None:
            self._row(e).lost[name] = (how, kind, reason)

    def _on_round_committed(self, e: Mapping[str, Any]) -> None:
        row = self._row(e)
        if not row.open:
            row = self._new_row(e)
        row.close(e)
        if row.outcome == "commit":
            self.last_commit_at = number(e.get("t")) or self.last_commit_at
        for name, reason in row.unexplained.items():
            self._site(name)
            self.refused.append(Refused(row.round, name, "rejected", reason))
        heldout = e.get("heldout")
        if isinstance(heldout, Mapping) and row.round - 1 not in self.heldout:
            self.heldout[row.round - 1] = dict(heldout)

    def _on_evaluated(self, e: Mapping[str, Any]) -> None:
        index = whole(e.get("round"))
        if index is not None:
            (self.server_heldout if e.get("where") == "server" else self.heldout)[index] = dict(e)

    def _on_checkpoint_written(self, e: Mapping[str, Any]) -> None:
        self.checkpoint_round = whole(e.get("round"))

    def _on_privacy_release(self, e: Mapping[str, Any]) -> None:
        # A resume writes the rows of earlier lives again, under the same ids.
        self.privacy_releases.add(text(e.get("id")))
        for name in ("epsilon", "delta"):
            if (value := number(e.get(name))) is not None:
                self.privacy[name] = value

    def _on_traffic(self, e: Mapping[str, Any]) -> None:
        for row in items(e.get("rows")):
            if isinstance(row, Mapping):
                key = (text(row.get("site")), text(row.get("phase")), text(row.get("direction")))
                self.wire[key] = self.wire.get(key, 0) + (whole(row.get("bytes")) or 0)

    def _on_sample(self, e: Mapping[str, Any]) -> None:
        self.samples.append(Sample(text(e.get("when")), text(e.get("prompt")), text(e.get("answer"))))

    def _on_run_finished(self, e: Mapping[str, Any]) -> None:
        self.outcome = text(e.get("outcome")) or "finished"
        self.reason, self.exit_code = text(e.get("reason")), whole(e.get("exit_code"))
        for row in self.rounds:
            row.interrupt()

    def _on_site_silent(self, e: Mapping[str, Any]) -> None:
        until = f", left alone until round {e['resting_until']}" if whole(e.get("resting_until")) else ""
        self._note(e, f"{text(e.get('site'))} is online and says nothing{until}")

    def _on_version_differs(self, e: Mapping[str, Any]) -> None:
        self._note(e, f"{text(e.get('site'))}: {text(e.get('difference'))}")

    def _on_operator(self, e: Mapping[str, Any]) -> None:
        orders = [f"{k} {', '.join(map(text, items(e.get(k))))}" for k in ("pin", "ban", "unban") if e.get(k)]
        self._note(e, f"operator: {'; '.join(orders) or 'no orders'}")

    def _on_operator_ignored(self, e: Mapping[str, Any]) -> None:
        self._note(e, f"operator.toml was not understood: {text(e.get('reason'))}")

    def _note(self, e: Mapping[str, Any], what: str) -> None:
        self.notes.append(Note(number(e.get("t")), whole(e.get("round")), what))

    def _measure(self, e: Mapping[str, Any]) -> None:
        """Keep the numbers of an event that nothing here knows, by round: methods measure what they want."""
        index = whole(e.get("round"))
        if index is None:
            return
        name = text(e.get("event"))
        for key, value in measures(
            {k: v for k, v in e.items() if k not in ("t", "round", "attempt")}
        ).items():
            self.measured.setdefault(f"{name}.{key}", {}).setdefault(index, []).append(value)

    # Look-ups.

    def _site(self, name: Any) -> SiteRow:
        return self.sites.setdefault(text(name), SiteRow(text(name)))

    def _row(self, e: Mapping[str, Any], *, late: bool = False) -> RoundRow:
        """The newest row of the event's round and attempt; a late update belongs to the open round."""
        if late and self.rounds and self.rounds[-1].open:
            return self.rounds[-1]
        index, attempt = whole(e.get("round")), whole(e.get("attempt"))
        for row in reversed(self.rounds):
            if row.round == index and attempt in (None, row.attempt):
                return row
        return self._new_row(e)

    def _new_row(self, e: Mapping[str, Any]) -> RoundRow:
        row = RoundRow(round=whole(e.get("round")) or 0, attempt=whole(e.get("attempt")) or 1)
        self.rounds.append(row)
        return row

    # Numbers over the whole run.

    @property
    def finished(self) -> bool:
        return self.outcome != "running"

    @property
    def committed(self) -> list[RoundRow]:
        """The committed rounds that stand, one per round number (the last commit), by number."""
        last = {row.round: row for row in self.rounds if row.outcome == "commit"}
        return [last[index] for index in sorted(last)]

    @property
    def open_round(self) -> RoundRow | None:
        return next((row for row in reversed(self.rounds) if row.open), None)

    def train_curve(self) -> list[tuple[int, float]]:
        """(round, mean training loss) of the committed rounds that have one."""
        return [(r.round, r.train_loss) for r in self.committed if r.train_loss is not None]

    def heldout_curve(self, where: str = "sites") -> list[tuple[int, float]]:
        """(state, held-out loss), state 0 the initial one; `where` = sites (joint) or server."""
        source = self.server_heldout if where == "server" else self.heldout
        points = ((index, number(source[index].get("loss"))) for index in sorted(source))
        return [(index, loss) for index, loss in points if loss is not None]

    def heldout_band(self) -> list[tuple[int, float, float]]:
        """(state, lowest, highest held-out loss over the sites) for states with two or more sites."""
        band = []
        for index in sorted(self.heldout):
            losses = list(self.site_heldout(index).values())
            if len(losses) >= 2:
                band.append((index, min(losses), max(losses)))
        return band

    def site_heldout(self, index: int) -> dict[str, float]:
        """Held-out loss of each site on state `index`; sites without a number are left out."""
        sites = self.heldout.get(index, {}).get("sites")
        return {text(k): loss for k, v in _mapping(sites).items() if (loss := _loss_of(v)) is not None}

    def first_last_heldout(self, site: str = "") -> tuple[float | None, float | None]:
        """First and last known held-out loss, joint ("") or of one site; last is None with one value."""
        states = [self.heldout[index] for index in sorted(self.heldout)]
        known = [_loss_of(_mapping(s.get("sites")).get(site) if site else s) for s in states]
        losses = [loss for loss in known if loss is not None]
        return (losses[0] if losses else None, losses[-1] if len(losses) > 1 else None)

    def contributions(self) -> dict[str, tuple[int, int]]:
        """{site: (rounds, tokens)} of the committed rounds that carry its update; others are absent."""
        found: dict[str, tuple[int, int]] = {}
        for row in self.committed:
            for site in row.accepted:
                rounds, tokens = found.get(site, (0, 0))
                found[site] = rounds + 1, tokens + (whole(row.updates.get(site, {}).get("tokens")) or 0)
        return found

    def exactness(self) -> tuple[float, RoundRow, int] | None:
        """(largest relative error, its round, rounds with a certificate), or None without certificates."""
        rows = [(row.exactness_error, row) for row in self.committed if row.exactness_error is not None]
        if not rows:
            return None
        worst, row = max(rows, key=lambda pair: pair[0])
        return worst, row, len(rows)

    def measures(self) -> dict[str, list[tuple[int, float]]]:
        """{name: (round, value)} of everything measured that has no place of its own, means over a round's events."""
        found: dict[str, list[tuple[int, float]]] = {}
        for row in self.committed:
            for name, value in row.extra.items():
                found.setdefault(name, []).append((row.round, value))
        for name, rounds in self.measured.items():
            found[name] = [(index, sum(v) / len(v)) for index, v in sorted(rounds.items())]
        return dict(sorted(found.items()))

    def bytes_up(self) -> int:
        return sum(row.bytes_up for row in self.rounds)

    def bytes_down(self) -> int:
        return sum(row.bytes_down for row in self.rounds)

    def wire_bytes(self, direction: str) -> int:
        """Bytes on the wire of all messages, "up" from the sites or "down" to them; 0 where they were not counted."""
        return sum(size for (_, _, way), size in self.wire.items() if way == direction)

    def traffic(self) -> dict[str, dict[str, dict[str, int]]]:
        """{site: {phase: {"up": bytes, "down": bytes}}} on the wire."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for (site, phase, direction), size in sorted(self.wire.items()):
            found.setdefault(site, {}).setdefault(phase, {"up": 0, "down": 0})[direction] = size
        return found

    def tokens(self) -> int:
        """Tokens of all updates that stand in a committed round."""
        return sum(tokens for _, tokens in self.contributions().values())

    def elapsed_seconds(self, now: float | None = None) -> float | None:
        """From the first start to the last event, or to `now` (unix seconds) while the run goes on."""
        end = now if now is not None and not self.finished else self.last_event_at
        return None if self.started_at is None or end is None else max(0.0, end - self.started_at)

    def eta_seconds(self, now: float | None = None) -> float | None:
        """Rounds left x median time of the last 8 closed rounds, less the age of the open one."""
        times = [r.total_seconds for r in self.rounds if r.total_seconds is not None and not r.open][-8:]
        if self.finished or not times or self.num_rounds is None:
            return None
        left = max(0, self.num_rounds - len(self.committed)) * statistics.median(times)
        row = self.open_round
        age = (
            now - row.opened_at if now is not None and row is not None and row.opened_at is not None else 0.0
        )
        return max(0.0, left - max(0.0, min(age, statistics.median(times))))


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _loss_of(value: Any) -> float | None:
    return number(value.get("loss") if isinstance(value, Mapping) else value)
