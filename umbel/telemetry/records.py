"""The rows a history is made of: a round, a site, a refusal, a sample; and how to read a doubtful field.

`participation` of a (round, site) is one word:

    accepted  in the committed sum          late     in it, sent for an earlier round
    unused    the round was skipped, cut off or undone
    rejected  the server refused the update failed   the site answered with an error
    missing   asked, no answer in time      waiting  asked, the round is still open        idle  not asked
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


def number(value: Any) -> float | None:
    """A finite float, or None for anything else (bool included)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: Any) -> int | None:
    """An int (a float is cut), or None."""
    found = number(value)
    return None if found is None else int(value)


def text(value: Any) -> str:
    """The value as text; None is empty."""
    return "" if value is None else str(value)


def items(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return list(value) if isinstance(value, (list, tuple)) else []


# Fields of a round record that have a place of their own; numbers in any other are shown as measures.
ROUND_FIELDS = {
    "t",
    "event",
    "round",
    "attempt",
    "outcome",
    "selected",
    "goal",
    "quorum",
    "accepted",
    "rejected",
}
ROUND_FIELDS |= {
    "missing",
    "bytes_up",
    "bytes_down",
    "seconds",
    "state_crc",
    "heldout",
    "train_loss",
    "tokens",
}
ROUND_FIELDS |= {"exactness", "why", "in_flight"}


def measures(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers in nested mappings, by dotted name; lists and text are left out."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= measures(value, f"{prefix}{key}.")
        elif (known := number(value)) is not None:
            found[f"{prefix}{key}"] = known
    return found


class Note(NamedTuple):
    """Something that happened and is no refusal: `round` None outside of rounds."""

    t: float | None
    round: int | None
    what: str


class Refused(NamedTuple):
    """An update or a site that was not taken; `round` is None at joining."""

    round: int | None
    site: str
    kind: str
    reason: str


class Sample(NamedTuple):
    when: str
    prompt: str
    answer: str


@dataclass
class RoundRow:
    """One attempt at one round. Losses in nats a token, sizes in bytes, times in seconds.

    `outcome`: open, commit, skip, abort; interrupted (the process ended) or undone (resumed from before it).
    """

    round: int
    attempt: int = 1
    selected: list[str] = field(default_factory=list)
    goal: int | None = None
    quorum: int | None = None
    deadline_seconds: float | None = None
    opened_at: float | None = None
    outcome: str = "open"
    updates: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    unexplained: dict[str, str] = field(default_factory=dict)
    accepted: dict[str, bool] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    received_bytes: int = 0
    counted_up: int | None = None
    counted_down: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    state_crc: str = ""
    exactness_error: float | None = None
    exactness_layer: str = ""
    # Whatever else the record measured, flattened: {"privacy.epsilon": 1.5, "drift": 0.2}.
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        return self.outcome == "open"

    def interrupt(self) -> None:
        """The process ended, or the round was opened again, before this attempt was closed."""
        if self.open:
            self.outcome = "interrupted"

    def close(self, e: Mapping[str, Any]) -> None:
        """Take the round record `e` (the event round_committed)."""
        self.outcome = text(e.get("outcome")) or "commit"
        accepted = [a for a in items(e.get("accepted")) if isinstance(a, Mapping)]
        self.accepted = {text(a.get("site")): bool(a.get("late")) for a in accepted}
        self.missing = [text(s) for s in items(e.get("missing"))]
        for entry in items(e.get("rejected")):
            if isinstance(entry, Mapping) and text(entry.get("site")) not in self.lost:
                self.unexplained[text(entry.get("site"))] = text(entry.get("reason"))
                self.lost[text(entry.get("site"))] = ("rejected", "rejected", text(entry.get("reason")))
        self.counted_up, self.counted_down = whole(e.get("bytes_up")), whole(e.get("bytes_down"))
        seconds = e.get("seconds")
        if isinstance(seconds, Mapping):
            self.seconds = {text(k): s for k, v in seconds.items() if (s := number(v)) is not None}
        self.state_crc = text(e.get("state_crc"))
        self.train_loss = number(e.get("train_loss"))
        exactness = e.get("exactness")
        if isinstance(exactness, Mapping):
            self.exactness_error = number(exactness.get("relative_error"))
            self.exactness_layer = text(exactness.get("worst_layer"))
        self.extra = measures({k: v for k, v in e.items() if k not in ROUND_FIELDS})

    def residual_ratios(self) -> list[float]:
        """|residual| / |change| of the updates that state one, by site."""
        ratios = (number(self.updates[site].get("residual_ratio")) for site in sorted(self.updates))
        return [ratio for ratio in ratios if ratio is not None]

    @property
    def bytes_up(self) -> int:
        """Bytes from the sites: as counted by the round record, else the sum of its updates."""
        return self.received_bytes if self.counted_up is None else self.counted_up

    @property
    def bytes_down(self) -> int:
        return self.sent_bytes if self.counted_down is None else self.counted_down

    @property
    def total_seconds(self) -> float | None:
        return self.seconds.get("total")

    @property
    def num_late(self) -> int:
        return sum(self.accepted.values())

    @property
    def dropped(self) -> list[str]:
        """Sites whose work of this round is lost: rejected, failed or without an answer, by name."""
        return sorted(({*self.lost} | {*self.missing}) - {*self.accepted})

    def tokens(self) -> int:
        """Tokens of the updates in the committed sum; 0 when there is none."""
        if self.outcome != "commit":
            return 0
        return sum(whole(u.get("tokens")) or 0 for s, u in self.updates.items() if s in self.accepted)

    def time_split(self) -> dict[str, float]:
        """Mean seconds over the updates of load, train, eval and encode; wait is the rest of the total.

        Load holds what a site needs before its first step: model (`load`) and state and data (`prepare`).
        """
        reports = [s for u in self.updates.values() if isinstance(s := u.get("seconds"), Mapping)]
        if not reports:
            return {}
        split = {
            phase: sum(number(r.get(phase)) or 0.0 for r in reports) / len(reports)
            for phase in ("load", "prepare", "train", "eval", "encode")
        }
        split["load"] += split.pop("prepare")
        if self.total_seconds is not None:
            split["wait"] = max(0.0, self.total_seconds - sum(split.values()))
        return split

    def participation(self, site: str) -> str:
        """One word for what became of this site in this round (see the module)."""
        if site in self.accepted:
            taken = "late" if self.accepted[site] else "accepted"
            return taken if self.outcome == "commit" else "unused"
        if site in self.lost:
            return self.lost[site][0]
        if site in self.updates:
            return "accepted" if self.open else "unused"
        if site in self.missing:
            return "missing"
        if site not in self.selected:
            return "idle"
        if self.open:
            return "waiting"
        return "unused" if self.outcome in ("interrupted", "undone") else "missing"

    def why(self, site: str) -> str:
        """The reason given for a lost update; empty for the others."""
        return self.lost[site][2] if site in self.lost else ""


@dataclass
class SiteRow:
    """One site over the whole run."""

    site: str
    joined: bool = False
    node: str = ""
    rows_train: int | None = None
    rows_heldout: int | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    train_seconds: float = 0.0
    trained_tokens: int = 0
    last_loss: float | None = None
    peak_memory_bytes: int | None = None

    def take_update(self, e: Mapping[str, Any]) -> None:
        """Add one accepted update."""
        self.bytes_up += whole(e.get("bytes")) or 0
        self.trained_tokens += whole(e.get("tokens")) or 0
        seconds = e.get("seconds")
        self.train_seconds += (number(seconds.get("train")) or 0.0) if isinstance(seconds, Mapping) else 0.0
        self.last_loss = number(e.get("loss"))
        memory = whole(e.get("peak_memory_bytes"))
        self.peak_memory_bytes = (
            max(memory, self.peak_memory_bytes or 0) if memory else self.peak_memory_bytes
        )

    @property
    def tokens_per_second(self) -> float | None:
        return self.trained_tokens / self.train_seconds if self.train_seconds > 0 else None
