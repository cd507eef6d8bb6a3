"""Privacy in the round engine: the budget is looked at before a round, the ledger written before its release.

    open    would one more release exceed the budget? then stop: no site is asked
    commit  sum -> ledger row durable (event `privacy_release`) -> noise -> next state -> checkpoint -> dispatch

The rows live in the run's event log, fsynced, and in every checkpoint; a resume takes the union. A crash between row
and checkpoint counts a release that nobody saw. A skipped round has released nothing and costs nothing. Every round
counts in full (q = 1): who took part is no secret here, so no amplification by sampling is claimed.

Losses, norms and held-out results in the event log are *not* covered by the guarantee: they stay with the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strategies import Outcome, SiteUpdate, UmbelStrategy
from strategies.private_mean import PrivateMean
from umbel.config import Config
from umbel.privacy.ledger import Ledger, new_release
from umbel.privacy.noise import Normal, seeded_normal, system_normal
from umbel.privacy.rdp import epsilon_after, releases_within
from umbel.telemetry.events import read_events

log = logging.getLogger("umbel.server")

RELEASE_EVENT = "privacy_release"


class Privacy:
    """The private merge of a run and its ledger."""

    def __init__(self, config: Config, strategy: UmbelStrategy, event: Callable[..., None]) -> None:
        self.settings, self._seed, self._event = config.privacy, config.run.seed, event
        self._mean = PrivateMean(strategy)
        self.ledger = Ledger(config.privacy.delta, config.privacy.budget_epsilon)

    def check(self, round_index: int) -> None:
        """Raise BudgetExhausted when the release of this round would not fit."""
        self.ledger.check(new_release(round_index, 0, self.settings.noise_multiplier))

    def merge(
        self, round_index: int, attempt: int
    ) -> Callable[[Mapping[str, np.ndarray], Iterable[SiteUpdate]], Outcome]:
        """Return the aggregation of one attempt, with the signature of a method's own."""

        def before_release() -> Normal:
            release = new_release(round_index, attempt, self.settings.noise_multiplier)
            after = self.ledger.check(release)
            self._event(
                RELEASE_EVENT,
                fsync=True,
                **release.to_dict(),
                clip_norm=self.settings.clip_norm,
                epsilon=after,
                delta=self.ledger.delta,
            )
            self.ledger.add(release)
            if self.settings.noise_source == "system":
                return system_normal
            return seeded_normal(self._seed, round_index, attempt)

        def aggregate(
            state: Mapping[str, np.ndarray],
            updates: Iterable[SiteUpdate],
            *,
            expected_weight: float | None = None,
        ) -> Outcome:
            outcome = self._mean.aggregate(
                state, updates, num_asked=expected_weight or 1.0, before_release=before_release
            )
            outcome.metrics["privacy"] |= self.spent()
            return outcome

        return aggregate

    def spent(self) -> dict[str, Any]:
        """Return epsilon, delta and the number of releases so far."""
        return {
            "epsilon": self.ledger.epsilon,
            "delta": self.ledger.delta,
            "releases": len(self.ledger.releases),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return the ledger for a checkpoint."""
        return [release.to_dict() for release in self.ledger.releases]

    def recall(self, rows: Iterable[Mapping[str, Any]], *, logged: Collection[str] = ()) -> None:
        """Take over earlier rows; those whose ids this life's log does not hold (`logged`) are written down again."""
        self.ledger.recall(rows)
        for release in self.ledger.releases:
            if release.id not in logged:
                self._event(RELEASE_EVENT, fsync=True, **release.to_dict(), carried=True, **self.spent())

    def announce(self, rounds: int) -> None:
        """Log what the run as it is configured will cost, and where it will stop."""
        z, delta, spent = self.settings.noise_multiplier, self.ledger.delta, len(self.ledger.releases)
        log.info(
            "privacy: epsilon = %.3g at delta = %g after %d rounds (clip %g, noise %g, spent so far %.3g)",
            epsilon_after([(1.0, z)] * rounds, delta),
            delta,
            rounds,
            self.settings.clip_norm,
            z,
            self.ledger.epsilon,
        )
        if self.settings.noise_source == "seed":
            log.warning("privacy.noise-source = 'seed': whoever knows the seed removes the noise; no privacy")
        if self.ledger.budget > 0:
            fits = releases_within(self.ledger.budget, z, delta, most=rounds)
            if fits < rounds:
                log.warning(
                    "privacy: the budget of epsilon = %g ends after %d of %d rounds (%d releases are spent)",
                    self.ledger.budget,
                    fits,
                    rounds,
                    spent,
                )


def earlier_releases(config: Config, events_jsonl: Path) -> list[dict[str, Any]]:
    """Return the ledger rows written by earlier lives of a run: in its own log, and beside the checkpoint it starts from.

    A line that a crash has torn stands for no release: it is written, durably, before one is made.
    """
    if config.privacy.clip_norm <= 0:
        return []
    logs = [events_jsonl]
    if config.run.resume not in ("none", "auto"):
        logs.append(Path(config.run.resume).expanduser().parent.parent / events_jsonl.name)
    return [e for path in logs for e in read_events(path) if e["event"] == RELEASE_EVENT and "id" in e]
