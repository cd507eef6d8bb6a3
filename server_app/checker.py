"""Looks at a finished run, after the fact, and says what is not as it must be. `python -m server_app.checker RUN`

    I1  a site is accepted at most once in an attempt, and its update of one round at most once in what stands
    I2  what was accepted was validated: an `update_accepted` of the same round, attempt, site and content, no refusal
    I3  each committed state follows from the one before and the kept updates (needs `telemetry.keep-updates`)
    I4  rounds that stand are 1, 2, 3, ..; attempts of a round strictly increase, whatever died in between
    I5  under privacy, a committed round has its own ledger row earlier in the log, and epsilon never falls
    I6  messages in flight after a commit are bounded by what the last rounds asked
    I7  every wait of a round ended within its deadline

It reads only files, so that it can be run on a copy, by somebody else, years later.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from server_app import audit
from umbel.telemetry.events import scan_events

# A wait may overrun by a poll, by one call to Flower that is being retried, and by the fsync of a record.
SLACK_SECONDS = 5.0


def check_run(folder: Path, *, slack_seconds: float = SLACK_SECONDS) -> list[str]:
    """Return what is wrong with the run in `folder`, one sentence each; an empty list is a good run."""
    events, unreadable = scan_events(folder / "events.jsonl")
    problems = [f"{unreadable} lines of events.jsonl cannot be read"] if unreadable > starts(events) else []
    standing = commits(events)
    for check in (accepted_once, validated, in_order, released, bounded):
        problems += check(events, standing)
    problems += waits(events, slack_seconds)
    if (folder / audit.FOLDER / "start.frame").exists():
        problems += recomputed(folder, standing)
    return problems


def starts(events: list[dict[str, Any]]) -> int:
    """Return how often a server started: each may have torn the last line of the one before."""
    return sum(e["event"] == "run_started" for e in events)


def commits(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records that stand, in order: a resume undoes those after the round it goes on from."""
    standing: list[dict[str, Any]] = []
    for e in events:
        if e["event"] == "run_started" and e.get("resumed_from") is not None:
            standing = [r for r in standing if r["round"] <= e["resumed_from"]]
        elif e["event"] == "round_committed" and e.get("outcome") == "commit":
            standing.append(e)
    return standing


def accepted_once(events: list[dict[str, Any]], standing: list[dict[str, Any]]) -> list[str]:
    """I1."""
    counts: Counter[tuple[str, int]] = Counter()
    for record in standing:
        counts.update((a["site"], int(a.get("of_round", record["round"]))) for a in record["accepted"])
    return [f"I1: the update of {s} for round {r} counts {n} times" for (s, r), n in counts.items() if n > 1]


def validated(events: list[dict[str, Any]], standing: list[dict[str, Any]]) -> list[str]:
    """I2."""
    passed: set[tuple] = set()
    refused: set[tuple] = set()
    for e in events:
        if e["event"] == "update_accepted":
            passed.add((e["round"], e.get("attempt"), e["site"], e.get("crc"), bool(e.get("late"))))
        elif e["event"] == "update_rejected" and not e.get("late"):
            refused.add((e["round"], e.get("attempt"), e["site"]))
    problems = []
    for r in standing:
        for a in r["accepted"]:
            key = (r["round"], r["attempt"], a["site"], a["crc"], bool(a["late"]))
            if key not in passed:
                problems.append(f"I2: round {r['round']} counts {a['site']}, which was never validated")
            if not a["late"] and key[:3] in refused:
                problems.append(f"I2: round {r['round']} counts {a['site']}, which was refused")
    return problems


def in_order(events: list[dict[str, Any]], standing: list[dict[str, Any]]) -> list[str]:
    """I4."""
    problems = []
    rounds = [r["round"] for r in standing]
    if rounds != list(range(1, len(rounds) + 1)):
        problems.append(f"I4: the committed rounds are {rounds[:20]}")
    newest: dict[int, int] = {}
    for e in events:
        if e["event"] == "round_opened":
            if e["attempt"] <= newest.get(e["round"], 0):
                problems.append(f"I4: attempt {e['attempt']} of round {e['round']} was opened twice")
            newest[e["round"]] = e["attempt"]
    return problems


def released(events: list[dict[str, Any]], standing: list[dict[str, Any]]) -> list[str]:
    """I5."""
    problems, rows, spent = [], Counter[tuple[int, int]](), 0.0
    for e in events:
        if e["event"] == "privacy_release":
            if not e.get("carried"):
                rows[e["round"], e["attempt"]] += 1
            if e["epsilon"] < spent:
                problems.append(f"I5: epsilon falls from {spent:g} to {e['epsilon']:g} in round {e['round']}")
            spent = max(spent, e["epsilon"])
        elif e["event"] == "round_committed" and "privacy" in e and not rows[e["round"], e["attempt"]]:
            problems.append(f"I5: round {e['round']} was released without a ledger row")
    return problems


def bounded(events: list[dict[str, Any]], standing: list[dict[str, Any]]) -> list[str]:
    """I6: what is still waited for was asked in a round young enough to be of use."""
    config: dict = next((e["config"] for e in events if e["event"] == "run_started"), {})
    reach = int(config.get("clients.late-rounds", 2))
    asked = Counter[int]()
    for e in events:
        if e["event"] == "round_opened":
            asked[e["round"]] += len(e["selected"])
    problems = []
    for r in standing:
        young = sum(n for index, n in asked.items() if r["round"] - reach <= index <= r["round"])
        if r.get("in_flight", 0) > young:
            problems.append(
                f"I6: {r['in_flight']} messages in flight after round {r['round']}, {young} asked"
            )
    return problems


def waits(events: list[dict[str, Any]], slack_seconds: float) -> list[str]:
    """I7."""
    limits = {
        (e["round"], e["attempt"]): e["deadline_seconds"] for e in events if e["event"] == "round_opened"
    }
    problems = []
    for e in events:
        if e["event"] != "round_committed":
            continue
        limit = limits.get((e["round"], e["attempt"]))
        waited = e["seconds"]["collect"] + e["seconds"]["dispatch"]
        if limit is not None and waited > limit + slack_seconds:
            problems.append(f"I7: round {e['round']} waited {waited:.0f} s, its deadline was {limit:.0f} s")
    return problems


def recomputed(folder: Path, standing: list[dict[str, Any]]) -> list[str]:
    """I3: every state again from the kept updates, by the run's own method, compared bit for bit."""
    import compression
    from server_app.start import prepare
    from strategies import SiteUpdate, build
    from strategies.robust_merge import RobustMerge
    from umbel.config import resolve
    from umbel.digest import state_crc

    config = resolve(folder / "config.toml", [])
    start = prepare(config)
    strategy = build(config, start.layout, start.scales)
    aggregate = strategy.aggregate
    if config.clients.merge != "mean":
        aggregate = RobustMerge(config, strategy).aggregate
    frame = (folder / audit.FOLDER / "start.frame").read_bytes()
    state = compression.decode(frame, start.layout)
    problems = []
    for r in standing:
        kept = audit.round_folder(folder, r["round"], r["attempt"])
        index = json.loads((kept / "index.json").read_text("utf-8"))
        names = [(a["site"], a["weight"]) for a in r["accepted"]]
        if [(k["key"].split("\x00")[0], k["weight"]) for k in index] != names:
            problems.append(f"I3: the kept updates of round {r['round']} are not those of its record")
            break
        updates = []
        for number, (kept_update, a) in enumerate(zip(index, r["accepted"])):
            arrays = compression.decode((kept / f"{number:03d}.frame").read_bytes(), start.layout)
            if state_crc(arrays) != a["crc"]:
                problems.append(f"I3: the kept update of {a['site']} in round {r['round']} is another one")
            updates.append(SiteUpdate(a["site"], kept_update["weight"], arrays, int(a.get("tokens", 0))))
        weight = float(np.mean([k["weight"] for k in index])) * len(r["selected"])
        state = aggregate(state, iter(updates), expected_weight=weight).state
        if state_crc(state) != r["state_crc"]:
            problems.append(f"I3: round {r['round']} does not follow from its updates")
            break
    return problems


def main() -> int:
    """Print the problems of the run folder named on the command line; exit code 1 when there are any."""
    problems = check_run(Path(sys.argv[1]))
    print("\n".join(problems) or "nothing is wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
