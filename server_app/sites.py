"""The institutions of a run: who is there, who fits, who is trusted.

A site's identity is the name its operator gave it, never Flower's node id, which changes at every start. Joining
compares what must agree (base weights, tokenizer, adapter, tensor layout) with a reference: the server's own where
it can compute one, else what most of the joining sites say. What differs is refused, with both fingerprints.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from server_app.operator import Orders
from umbel.digest import short

NO_ORDERS = Orders()
# Outcomes of a site's updates that its instructions repeat: more than it can have undecided.
KEEP_OUTCOMES = 12
MUST_AGREE = ("model", "tokenizer", "adapter", "layout", "corpus")

STRIKES_TO_QUARANTINE = 3
STRIKE_WINDOW = 10
# Rounds in a row without a word (no update, no error) after which a site is asked only now and then: a node whose
# worker is dead stays online and would cost every round its full wait.
SILENCES_TO_REST = 2


@dataclass
class Site:
    """One institution. `settled` is (round, attempt) of its last committed update."""

    name: str
    node: int
    facts: dict[str, Any] = field(default_factory=dict)
    settled: tuple[int, int] = (0, 0)
    outcomes: list[list] = field(default_factory=list)
    strikes: list[int] = field(default_factory=list)
    quarantines: int = 0
    banned_until: int = 0
    # Rounds in a row that it left unanswered, and the round until which it is left alone for that.
    silences: int = 0
    resting_until: int = 0
    # Name of the model it proved or said to hold, where the way down is lossy (`server_app.downlink`).
    held: str = ""

    def note(self, round_index: int, attempt: int, outcome: str) -> None:
        """Remember what became of one update; the newest few are told to the site."""
        self.outcomes = [*self.outcomes, [round_index, attempt, outcome]][-KEEP_OUTCOMES:]

    def memory(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this site."""
        return {
            "settled": list(self.settled),
            "outcomes": self.outcomes,
            "strikes": self.strikes,
            "quarantines": self.quarantines,
            "banned_until": self.banned_until,
            "silences": self.silences,
            "resting_until": self.resting_until,
            "held": self.held,
        }


class Registry:
    """Sites by name, with the reference they are compared against."""

    def __init__(self, reference: dict[str, str] | None = None) -> None:
        self.reference: dict[str, str] = {k: v for k, v in (reference or {}).items() if v}
        self.sites: dict[str, Site] = {}
        self._memories: dict[str, dict[str, Any]] = {}

    def recall(self, memories: dict[str, dict[str, Any]]) -> None:
        """Take over the sites' records of a checkpoint; they apply when a site of that name joins."""
        self._memories = dict(memories)

    def memories(self) -> dict[str, dict[str, Any]]:
        """Return the records of all sites ever seen, for a checkpoint."""
        return {**self._memories, **{name: site.memory() for name, site in self.sites.items()}}

    def set_reference(self, joining: list[dict[str, Any]]) -> None:
        """Fill what the reference lacks with the value most joining sites state; ties go to the smallest."""
        for key in MUST_AGREE:
            values = Counter(str(facts.get(key, "")) for facts in joining if facts.get(key))
            if key not in self.reference and values:
                self.reference[key] = min(values, key=lambda v: (-values[v], v))

    def mismatch(self, facts: dict[str, Any]) -> str:
        """Return why these facts do not fit the run, naming both fingerprints; empty when they do."""
        for key in MUST_AGREE:
            want, got = self.reference.get(key, ""), str(facts.get(key, ""))
            if want and got != want:
                return f"its {key} fingerprint is {short(got) or 'missing'}, the run's is {short(want)}"
        return ""

    def admit(self, name: str, node: int, facts: dict[str, Any], *, online: set[int]) -> str:
        """Add or update a site; returns the reason when it is refused, else an empty string."""
        reason = self.mismatch(facts)
        if reason:
            return reason
        known = self.sites.get(name)
        if known is not None and known.node != node and known.node in online:
            return f"another site that is online has the name {name!r} already; give each site its own name"
        if known is None:
            past = self._memories.get(name, {})
            known = Site(
                name,
                node,
                settled=tuple(past.get("settled", (0, 0))),  # type: ignore[arg-type]
                outcomes=list(past.get("outcomes", [])),
                strikes=list(past.get("strikes", [])),
                quarantines=int(past.get("quarantines", 0)),
                banned_until=int(past.get("banned_until", 0)),
                silences=int(past.get("silences", 0)),
                resting_until=int(past.get("resting_until", 0)),
                held=str(past.get("held", "")),
            )
            self.sites[name] = known
        if known.node != node:
            # A new process: its silence belonged to the old one.
            known.silences = known.resting_until = 0
        known.node, known.facts = node, facts
        if isinstance(facts.get("held"), str):
            known.held = facts["held"][:64]
        return ""

    def available(
        self, online: set[int], round_index: int, orders: Orders = NO_ORDERS, *, wake: bool = False
    ) -> list[Site]:
        """Return the sites that can be asked in this round, in order of name.

        `orders` are the operator's; `wake` includes sites that rest because they were silent.
        """

        def can(site: Site) -> bool:
            if site.node not in online or site.name in orders.ban:
                return False
            if site.name in orders.pin:
                return True
            return site.banned_until <= round_index and (wake or site.resting_until <= round_index)

        return [self.sites[name] for name in sorted(self.sites) if can(self.sites[name])]

    def pardon(self, name: str) -> None:
        """Forget a site's strikes, quarantine and silence: the operator's word."""
        site = self.sites.get(name)
        if site is not None:
            site.strikes, site.quarantines, site.banned_until = [], 0, 0
            site.silences = site.resting_until = 0

    def heard(self, name: str) -> None:
        """Note that a site said something: an update, a late one, or an error."""
        site = self.sites.get(name)
        if site is not None:
            site.silences = site.resting_until = 0

    def silent(self, name: str, round_index: int) -> int:
        """Note a round without a word; returns the round until which the site is left alone, or 0.

        From the second silent round in a row on: 2, 4, 8 .. rounds, each followed by one probe.
        """
        site = self.sites[name]
        site.silences += 1
        if site.silences < SILENCES_TO_REST:
            return 0
        site.resting_until = round_index + 1 + 2 ** min(site.silences - 1, 10)
        return site.resting_until

    def strike(self, name: str, round_index: int) -> int:
        """Count a fault against a site; returns the round until which it is now quarantined, or 0.

        Three strikes within ten rounds: out for 2^k rounds, k counting its quarantines, then one probe round.
        """
        site = self.sites.get(name)
        if site is None:
            return 0
        site.strikes = [r for r in [*site.strikes, round_index] if r > round_index - STRIKE_WINDOW]
        if len(site.strikes) < STRIKES_TO_QUARANTINE:
            return 0
        site.quarantines += 1
        site.banned_until = round_index + 1 + 2**site.quarantines
        # One strike is left: the probe round that follows fails on the next fault.
        site.strikes = site.strikes[-(STRIKES_TO_QUARANTINE - 1) :]
        return site.banned_until
