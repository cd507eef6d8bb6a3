"""Does a run's ledger hold? Reads files only, so that it can be run on a copy, by somebody else, years later.

Checked in this order, the first break is named:

    1  ledger.jsonl is a whole chain, and its rounds are 1, 2, 3, .. each on the state of the one before
    2  every signed manifest is the site's (signature), and says what the entry says (round, tokens, steps, bytes)
    3  a site keeps its key, and each of its manifests names the one of its that counted before
    4  the events say the same: accepted sites, weights and states of every committed round
    5  kept updates (telemetry.keep-updates) are the frames that were signed

What it cannot show: rounds cut off the end together with their events; only the sites' own records have those
(`umbel inspect`). A round without signatures (an older site) is counted, not refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from umbel.ledger import chain
from umbel.ledger.book import FILE, standing
from umbel.ledger.manifest import UNKNOWN, manifest_hash, manifest_in, manifest_problem
from umbel.telemetry.events import read_events


@dataclass
class Finding:
    """What a verification found; `broken` is the first broken link, '' for a ledger that holds."""

    rounds: int = 0
    entries: int = 0
    signed: int = 0
    kept: int = 0
    keys: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    broken: str = ""

    @property
    def ok(self) -> bool:
        return not self.broken


class _Broken(Exception):
    """The first broken link."""


def verify(run: Path) -> Finding:
    """Return the finding for a run folder."""
    found = Finding()
    try:
        _verify(run, found)
    except _Broken as broken:
        found.broken = str(broken)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found.broken = f"{FILE} has a line of another form ({type(error).__name__}: {error})"
    return found


def _verify(run: Path, found: Finding) -> None:
    path = run / FILE
    if not path.is_file():
        raise _Broken(f"{FILE} is missing")
    broken = chain.first_break(path)
    if broken:
        raise _Broken(broken)
    rounds = standing(chain.records(path))
    _in_order(rounds)
    found.rounds = len(rounds)
    last: dict[str, str] = {}
    for line in rounds:
        for entry in line["entries"]:
            found.entries += 1
            _entry(line, entry, last, found)
    _events(run, rounds)
    _kept(run, rounds, found)


def _in_order(rounds: list[dict[str, Any]]) -> None:
    state = ""
    for expected, line in enumerate(rounds, start=1):
        if line["round"] != expected:
            raise _Broken(f"round {line['round']} stands where round {expected} should")
        if line["base"] != state:
            raise _Broken(
                f"round {expected} was made on state {line['base'][:12]}, not on that of the round before"
            )
        state = line["state"]


def _entry(line: dict[str, Any], entry: dict[str, Any], last: dict[str, str], found: Finding) -> None:
    """Check one accepted update; `last` holds the hash of each site's newest manifest that counted."""
    site, where = entry["site"], f"round {line['round']}, site {entry['site']}"
    if "manifest" not in entry:
        if site in last:
            raise _Broken(f"{where}: no signature, though this site signed before")
        return
    manifest = manifest_in({"manifest": entry["manifest"]})
    if manifest is None:
        raise _Broken(f"{where}: the manifest has another form")
    said = {"run": line["run"], "site": site, "tokens": entry["tokens"], "steps": entry["steps"]}
    said["round"] = entry.get("of_round", line["round"])
    if not entry["late"]:
        # A late update was moved to the present state and encoded again: its size is not what the site signed.
        said |= {"bytes": entry["bytes"], "attempt": line["attempt"]}
    problem = manifest_problem(manifest, said)
    if problem:
        raise _Broken(f"{where}: {problem}")
    if found.keys.setdefault(site, manifest["key"]) != manifest["key"]:
        raise _Broken(f"{where}: signed with another key ({manifest['key'][:12]}) than before")
    if manifest["prev"] == UNKNOWN:
        found.notes.append(f"{where}: the site had lost its memory and starts a new chain")
    elif not entry["late"] and manifest["prev"] != last.get(site, ""):
        raise _Broken(f"{where}: the site names another update as its last one that counted")
    if not entry["late"]:
        last[site] = manifest_hash(manifest)
    found.signed += 1


def _events(run: Path, rounds: list[dict[str, Any]]) -> None:
    """The events and the ledger were written apart; they must tell the same story."""
    told: list[dict[str, Any]] = []
    for event in read_events(run / "events.jsonl"):
        if event["event"] == "run_started" and event.get("resumed_from") is not None:
            told = [r for r in told if r["round"] <= event["resumed_from"]]
        elif event["event"] == "round_committed" and event.get("outcome") == "commit":
            told.append(event)
    if not told:
        return
    for event, line in zip(told, rounds):
        same = event["round"] == line["round"] and event["state_crc"] == line["state"]
        names = [(a["site"], a["weight"]) for a in event["accepted"]]
        if not same or names != [(e["site"], e["weight"]) for e in line["entries"]]:
            raise _Broken(f"round {line['round']}: events.jsonl and {FILE} differ")
    if len(told) != len(rounds):
        raise _Broken(f"events.jsonl has {len(told)} committed rounds, {FILE} has {len(rounds)}")


def _kept(run: Path, rounds: list[dict[str, Any]], found: Finding) -> None:
    for line in rounds:
        folder = run / "updates" / f"round-{line['round']:06d}-{line['attempt']:04d}"
        if not (folder / "index.json").is_file():
            continue
        index = json.loads((folder / "index.json").read_text("utf-8"))
        for number, (kept, entry) in enumerate(zip(index, line["entries"])):
            if entry["late"] or "manifest" not in entry:
                continue
            where = f"round {line['round']}, site {entry['site']}"
            if kept["key"].split("\x00")[0] != entry["site"]:
                raise _Broken(f"{where}: the kept updates are in another order")
            frame = (folder / f"{number:03d}.frame").read_bytes()
            if hashlib.sha256(frame).hexdigest() != entry["manifest"]["frame"]:
                raise _Broken(f"{where}: the kept update is not the one that was signed")
            found.kept += 1
