"""The report's tables: sites, refusals, rounds, samples, configuration and versions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from umbel.telemetry.history import History
from umbel.telemetry.page import details, paragraph, section, table
from umbel.telemetry.records import RoundRow, whole
from umbel.telemetry.units import DASH, change, count, duration, loss, moment, size

# A run config holds no secrets; should one be put there by mistake, the page that is handed on hides it.
_SECRET = re.compile(r"(passw(or)?d|secret|api[-_]?key|credential|(auth|access|hf|hub)[-_]?token)\w*$", re.I)
HIDDEN = "(hidden)"


def sites_section(history: History, ledger: Sequence[Mapping[str, Any]] = ()) -> str:
    """What each site gave, and what its own held-out rows say about the result.

    `ledger` holds the rows of `umbel.ledger.contributions`: steps, signatures, loss without the site.
    """
    names, given, total = sorted(history.sites), history.contributions(), history.tokens()
    known = {str(row.get("site")): row for row in ledger}
    shares, results = [], []
    for name in names:
        site, (rounds, tokens) = history.sites[name], given.get(name, (0, 0))
        asked = sum(name in row.selected for row in history.rounds)
        late = sum(row.accepted.get(name, False) for row in history.committed)
        lost = sum(row.participation(name) in ("rejected", "failed", "missing") for row in history.rounds)
        share = f"{tokens / total:.1%}" if total else DASH
        traffic = [size(site.bytes_up), size(site.bytes_down)]
        counts = [str(asked), str(rounds), str(late), str(lost)]
        shares.append(
            [name, *counts, count(tokens), share, *traffic, *_from_ledger(known.get(name, {}), rounds)]
        )
        first, last = history.first_last_heldout(name)
        speed = [count(site.tokens_per_second), size(site.peak_memory_bytes)]
        rows = [count(site.rows_train), count(site.rows_heldout)]
        results.append([name, *rows, loss(first), loss(last), change(last, first) or DASH, *speed])
    header = [
        "Site",
        "Rounds asked",
        "Rounds used",
        "of these late",
        "Lost",
        "Tokens",
        "Share",
        "Received",
        "Sent",
        "Steps",
        "Signed",
        "Loss without it",
    ]
    caption = (
        "Contribution: rounds used, tokens and steps count committed updates; lost is refused, failed or unanswered; "
        "loss without it is the change of the held-out loss when its updates are left out"
    )
    tables = table(caption, header, shares, range(1, 12))
    header = ["Site", "Training rows", "Held-out rows", "Held-out loss, first", "last", "Change", "Tokens/s"]
    caption = "Data, result on the site's own held-out rows, and machine"
    tables += table(caption, [*header, "Peak memory"], results, range(1, 8))
    if len(names) <= 20:
        return section("sites", "Sites", tables)
    return section("sites", "Sites", details(f"{len(names)} sites", tables))


def _from_ledger(row: Mapping[str, Any], rounds: int) -> list[str]:
    steps, signed, change_ = row.get("steps"), row.get("signed"), row.get("loss_change")
    return [
        count(steps) if steps else DASH,
        f"{signed}/{rounds}" if signed is not None else DASH,
        f"{change_:+.4f}" if isinstance(change_, float) else DASH,
    ]


def notes_table(history: History) -> str:
    """What happened besides: restarts, silent sites, other versions, orders of the operator."""
    rows = [
        [moment(note.t), DASH if note.round is None else str(note.round), note.what]
        for note in history.notes[-40:]
    ]
    return table("What else happened, the last 40", ["When", "Round", "What"], rows, [1])


def refusals_section(history: History) -> str:
    """Sites and updates that were not taken, equal ones joined, and other events that are no progress."""
    notes = notes_table(history)
    joined: dict[tuple[str, str, str], list[int]] = {}
    for entry in history.refused:
        rounds = joined.setdefault((entry.site, entry.kind, entry.reason), [])
        if entry.round is not None:
            rounds.append(entry.round)
    rows = [
        [site, kind, reason or DASH, ranges(rounds) or "joining", str(max(1, len(rounds)))]
        for (site, kind, reason), rounds in joined.items()
    ]
    if not rows:
        if not history.rounds:
            return ""
        none = paragraph("No site and no update was refused.", "muted")
        return section("refusals", "Faults and refusals", none, notes)
    header = ["Site", "Kind", "Reason", "Rounds", "Times"]
    body = table("Sites and updates not taken", header, rows, [4])
    many = len(rows) > 20
    shown = details(f"{len(rows)} kinds of refusal", body) if many else body
    return section("refusals", "Faults and refusals", shown, notes)


def rounds_section(history: History) -> str:
    """Every attempt at a round: outcome, who contributed, who did not and why."""
    rows = [
        [
            str(row.round),
            str(row.attempt),
            row.outcome,
            contributors(row),
            "; ".join(f"{s}: {row.why(s) or 'no answer'}" for s in row.dropped) or DASH,
            loss(row.train_loss),
            count(row.tokens()),
            size(row.bytes_up),
            size(row.bytes_down),
            duration(row.total_seconds),
            row.state_crc[:12] or DASH,
        ]
        for row in history.rounds
    ]
    if not rows:
        return section("rounds", "Rounds", paragraph("No round has been opened.", "muted"))
    header = [
        "Round",
        "Attempt",
        "Outcome",
        "Contributed",
        "Lost and why",
        "Loss",
        "Tokens",
        "Received",
        "Sent",
    ]
    header += ["Time", "State CRC, first 12"]
    body = table("Rounds in the order they were opened", header, rows, [0, 1, 5, 6, 7, 8, 9])
    return section("rounds", "Rounds", details(f"{len(rows)} rounds", body, is_open=len(rows) <= 20))


def contributors(row: RoundRow) -> str:
    """Who is in the sum: names while they are few, else 'all N' or 'N of M'."""
    if row.outcome not in ("commit", "open"):
        unused = len(row.accepted or row.updates)
        return f"nobody ({unused} valid, not used)" if unused else "nobody"
    names = sorted(row.accepted or row.updates)
    if len(names) > 8:
        asked = len(row.selected)
        return f"all {asked}" if len(names) == asked else f"{len(names)} of {asked}"
    return ", ".join(f"{n} (late)" if row.accepted.get(n) else n for n in names) or "nobody"


def samples_section(history: History) -> str:
    """The same question before and after, side by side."""
    pairs: dict[str, dict[str, str]] = {}
    for sample in history.samples:
        pairs.setdefault(sample.prompt, {})[sample.when] = sample.answer
    parts = []
    for prompt, answers in pairs.items():
        shown = "".join(
            f"<div><h3>{escape(when)}</h3><pre>{escape(answers[when]) or '(empty)'}</pre></div>"
            for when in ("before", "after", *sorted({*answers} - {"before", "after"}))
            if when in answers
        )
        parts.append(
            f'<p class="prompt"><strong>{escape(prompt)}</strong></p><div class="answers">{shown}</div>'
        )
    return section("samples", "Sample answers", *parts)


def config_section(history: History, config: str) -> str:
    """The resolved recipe, or what the run said of it when the file is absent."""
    if config:
        lines = [_hide(line) for line in config.rstrip().splitlines()]
        return section("config", "Configuration", f"<pre>{escape(chr(10).join(lines))}</pre>")
    rows = [[key, HIDDEN if _SECRET.search(key) else str(value)] for key, value in flatten(history.config)]
    return section("config", "Configuration", table("Resolved settings", ["Key", "Value"], rows))


def versions_section(history: History, environment: Mapping[str, Any]) -> str:
    """Server versions, and where a site differs from them."""
    packages = environment.get("packages")
    server = {"python": environment.get("python"), **(packages if isinstance(packages, Mapping) else {})}
    keys = [k for k, v in server.items() if v]
    keys += sorted({k for site in history.sites.values() for k in site.versions} - {*keys})
    rows = [
        [key, str(server.get(key) or DASH), _site_versions(history, key, server.get(key))] for key in keys
    ]
    gpus = environment.get("gpus")
    machine = [
        str(environment.get("platform") or ""),
        f"{environment['num_cpus']} CPUs" if environment.get("num_cpus") else "",
        f"{size(memory)} memory" if (memory := whole(environment.get("memory_bytes"))) else "",
        ", ".join(str(g) for g in gpus) if isinstance(gpus, list) else "",
    ]
    said = ", ".join(part for part in machine if part)
    return section(
        "versions",
        "Versions",
        paragraph(f"Server: {said}", "muted") if said else "",
        table("Package versions", ["Package", "Server", "Sites"], rows),
    )


def _site_versions(history: History, key: str, server: Any) -> str:
    found: dict[str, list[str]] = {}
    for name in sorted(history.sites):
        if key in history.sites[name].versions:
            found.setdefault(str(history.sites[name].versions[key]), []).append(name)
    if not found:
        return DASH
    if [*found] == [str(server)]:
        return "same"
    return "; ".join(f"{v}: {', '.join(s) if len(s) <= 4 else f'{len(s)} sites'}" for v, s in found.items())


def flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, scalar) pairs of a nested mapping, in order."""
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            yield from flatten(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def ranges(numbers: Iterable[int]) -> str:
    """[1, 2, 3, 7] -> '1-3, 7'."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _hide(line: str) -> str:
    key, equals, _ = line.partition("=")
    return f"{key}= {HIDDEN}" if equals and _SECRET.search(key.strip().strip("\"'")) else line
