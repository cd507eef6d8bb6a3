"""The record of a round while it is open: who was sent what, and what came back so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord

from server_app.policy import RoundPolicy
from server_app.spool import Spool
from server_app.validate import Expected
from strategies import Order


@dataclass
class Ask:
    """What one train message in flight was sent for. `expected` is compared with the reply's header."""

    expected: Expected
    # What the site started from; kept only where a late update may be re-based on it.
    order: Order | None


@dataclass(frozen=True)
class Outgoing:
    """One frame and what it is; sites with the same order share it."""

    order: Order
    base: str
    frame: bytes
    record: ArrayRecord
    # Directives that belong to this frame, and the name of the model a site holds once it has read it.
    directives: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


@dataclass
class OpenRound:
    """Everything about the round being collected."""

    index: int
    attempt: int
    policy: RoundPolicy
    asked: list[str]
    began: float
    answered: set[str] = field(default_factory=set)
    spool: Spool = field(default_factory=Spool)
    rejected: list[dict[str, str]] = field(default_factory=list)
    heldout: dict[str, dict[str, float]] = field(default_factory=dict)
    quorum_at: float | None = None
    bytes_down: int = 0
    sent: dict[str, Outgoing] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        """Accepted updates of this round's own cohort; late ones of earlier rounds are not counted."""
        return sum(not entry.late for entry in self.spool.entries.values())
