"""What a run has spent: one row a release, and the epsilon they come to.

A row is written down durably *before* the release it stands for, so that a crash in between counts a release that
never happened and never the other way round. Rows have identities of their own: the same row read from the event log
and from a checkpoint counts once, two rows of one round count twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from umbel.errors import EXIT_PRIVACY, UmbelError
from umbel.privacy.rdp import epsilon_after


class BudgetExhausted(UmbelError):
    """The next release would spend more than `privacy.budget-epsilon`; nothing of it was released."""

    exit_code = EXIT_PRIVACY


@dataclass(frozen=True)
class Release:
    """One noisy aggregate. `sampling` is the chance with which a site took part, 1.0 unless it is drawn by Poisson."""

    id: str
    round: int
    attempt: int
    noise_multiplier: float
    sampling: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Release:
        """Inverse of `to_dict`; other keys are ignored. Raises KeyError or ValueError for a row that is damaged."""
        return cls(
            str(row["id"]),
            int(row["round"]),
            int(row["attempt"]),
            float(row["noise_multiplier"]),
            float(row.get("sampling", 1.0)),
        )


class Ledger:
    """The releases of a run in the order they were made, under one `delta` and, if > 0, a `budget` of epsilon."""

    def __init__(self, delta: float, budget: float = 0.0) -> None:
        self.delta, self.budget = delta, budget
        self._rows: dict[str, Release] = {}

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows that were written down earlier; known ones change nothing."""
        for row in rows:
            release = Release.from_dict(row)
            self._rows.setdefault(release.id, release)

    def add(self, release: Release) -> None:
        """Add a row; the caller has made it durable."""
        self._rows[release.id] = release

    @property
    def releases(self) -> list[Release]:
        """All rows."""
        return list(self._rows.values())

    @property
    def epsilon(self) -> float:
        """What is spent so far."""
        return self._epsilon(())

    def check(self, planned: Release) -> float:
        """Return epsilon with `planned` included; raises BudgetExhausted when that exceeds the budget."""
        after = self._epsilon((planned,))
        if self.budget > 0 and after > self.budget:
            raise BudgetExhausted(
                f"round {planned.round}: the privacy budget is spent: {len(self._rows)} releases cost epsilon = "
                f"{self.epsilon:.4g}, one more would make it {after:.4g}, got privacy.budget-epsilon = "
                f"{self.budget:g} at delta = {self.delta:g}. Nothing of this round was released and the last state "
                "is kept. Take the model as it is, or decide on a larger budget and resume."
            )
        return after

    def _epsilon(self, extra: tuple[Release, ...]) -> float:
        rows = [*self._rows.values(), *extra]
        return epsilon_after([(r.sampling, r.noise_multiplier) for r in rows], self.delta)


def new_release(round_index: int, attempt: int, noise_multiplier: float) -> Release:
    """Return a row with a fresh identity."""
    return Release(uuid.uuid4().hex, round_index, attempt, noise_multiplier)
