"""The server's ledger of a run, `ledger.jsonl` in the run folder: one chained line a committed round.

    {"kind": "round", "run", "round", "attempt", "base", "state", "entries": [...], "prev", "hash"}
    {"kind": "resume", "after": 7, ...}      rounds after 7 do not stand: the run went on from checkpoint 7

`base` and `state` name the global state before and after. An entry is one accepted update: site, weight, tokens,
steps, bytes, crc, late, and the site's signed manifest where it sent one. Written after the checkpoint is durable,
beside the event; a server that died in between writes the missing line when it resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbel.ledger import chain

FILE = "ledger.jsonl"
ENTRY = ("site", "weight", "tokens", "steps", "bytes", "crc", "late", "of_round")


def standing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rounds that stand, in order: a resume undoes those after the round it goes on from."""
    found: list[dict[str, Any]] = []
    for line in lines:
        if line.get("kind") == "resume":
            found = [r for r in found if r["round"] <= line.get("after", 0)]
        elif line.get("kind") == "round":
            found.append(line)
    return found


class Book:
    """Writes the ledger of one run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        rounds = standing(chain.records(self.path))
        self._round: int = rounds[-1]["round"] if rounds else 0
        self._state: str = rounds[-1]["state"] if rounds else ""

    def resume(self, after: int) -> None:
        """Note that the run goes on from the state after round `after`."""
        if self._round > after:
            rounds = [r for r in standing(chain.records(self.path)) if r["round"] <= after]
            chain.append(self.path, {"kind": "resume", "after": after}, fsync=True)
            self._round, self._state = after, rounds[-1]["state"] if rounds else ""

    def commit(self, run: str, record: Mapping[str, Any]) -> None:
        """Add a committed round from its record; a round that is in the book already is not added again."""
        if record.get("outcome") != "commit" or record["round"] <= self._round:
            return
        entries = []
        for accepted in record["accepted"]:
            entry = {k: accepted[k] for k in ENTRY if k in accepted}
            if accepted.get("manifest"):
                entry["manifest"] = accepted["manifest"]
            entries.append(entry)
        line = {
            "kind": "round",
            "run": run,
            "round": record["round"],
            "attempt": record["attempt"],
            "base": self._state,
            "state": record["state_crc"],
            "entries": entries,
        }
        chain.append(self.path, line, fsync=True)
        self._round, self._state = record["round"], record["state_crc"]
