"""report.html: one self-contained page about a run, for people who were not there.

No script, no request, no file beside it; readable on paper, in the dark, with a keyboard or a screen reader:
every chart has a title, a description and its numbers in a table. All text from outside is escaped. The
numbers are those of `history`; this file chooses and orders them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbel.fsio import write_atomic
from umbel.telemetry.events import scan_events
from umbel.telemetry.history import History
from umbel.telemetry.page import contents, heading, page, paragraph, tiles
from umbel.telemetry.report_charts import loss_section, participation_section, time_section, traffic_section
from umbel.telemetry.report_measures import exactness_section, measures_section
from umbel.telemetry.report_tables import (
    config_section,
    refusals_section,
    rounds_section,
    samples_section,
    sites_section,
    versions_section,
)
from umbel.telemetry.runfolder import RunFolder
from umbel.telemetry.units import count, duration, loss, moment, size
from umbel.telemetry.verdict import verdict


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the run folder and return its path; works at any moment of a run."""
    folder = RunFolder(run_dir)
    events, unreadable = scan_events(folder.events_jsonl)
    history = History.from_events(events)
    text = render_report(
        history,
        name=folder.name,
        config=_read(folder.config_toml),
        environment=_read_json(folder.environment_json),
        ledger=_ledger(folder.path),
        num_unreadable=unreadable,
    )
    write_atomic(folder.report_html, text.encode())
    return folder.report_html


def render_report(
    history: History,
    *,
    name: str = "",
    config: str = "",
    environment: Mapping[str, Any] | None = None,
    ledger: Sequence[Mapping[str, Any]] = (),
    num_unreadable: int = 0,
) -> str:
    """The page as text. `config` is the resolved recipe, `environment` what environment.json holds, `ledger` the rows
    of `umbel.ledger.contributions`."""
    title = f"{history.method or 'Run'} - {history.model or name or 'Umbel'}"
    sections = [
        loss_section(history),
        samples_section(history),
        sites_section(history, ledger),
        participation_section(history),
        refusals_section(history),
        exactness_section(history),
        traffic_section(history),
        time_section(history),
        measures_section(history),
        rounds_section(history),
        config_section(history, config),
        versions_section(history, environment or {}),
    ]
    return page(
        f"Umbel report: {title}",
        [
            _head(history, title, name),
            _warnings(history, num_unreadable),
            _tiles(history),
            contents(sections),
            *sections,
            "<footer>Made by Umbel from the event log of this run; events.jsonl holds every number.</footer>",
        ],
    )


def _head(history: History, title: str, name: str) -> str:
    when = moment(history.started_at)
    facts = [f"run {history.run or name}" if history.run or name else "", history.task, when]
    return heading(title, history.outcome, " · ".join(f for f in facts if f), verdict(history))


def _warnings(history: History, num_unreadable: int) -> str:
    notes = []
    if history.outcome not in ("running", "completed"):
        code = "" if history.exit_code is None else f" (exit code {history.exit_code})"
        notes.append(f"The run {history.outcome}: {history.reason or 'no reason given'}{code}.")
    if history.num_starts > 1:
        notes.append(f"The server process was started {history.num_starts} times; the run was resumed.")
    absent = sorted({*history.sites} - {*history.contributions()})
    if history.committed and absent:
        shown = ", ".join(absent[:8]) + (" ..." if len(absent) > 8 else "")
        notes.append(f"In no committed round: {shown}. The model holds nothing from these sites.")
    if num_unreadable:
        notes.append(f"{num_unreadable} line(s) of the event log could not be read and are left out.")
    return "".join(paragraph(note, "warn") for note in notes)


def _tiles(history: History) -> str:
    first, last = history.first_last_heldout()
    train = history.train_curve()
    committed, asked = len(history.committed), history.num_rounds
    skipped = sum(row.outcome in ("skip", "abort") for row in history.rounds)
    contributed = len(history.contributions())
    before = (
        f"{loss(first)} at the start" if last is not None else "measured once" if first else "not measured"
    )
    return tiles(
        [
            ("Held-out loss", loss(first if last is None else last), before),
            ("Training loss", loss(train[-1][1] if train else None), "last committed round"),
            ("Rounds", f"{committed}/{asked}" if asked else str(committed), f"{skipped} skipped or aborted"),
            ("Sites", f"{contributed}/{len(history.sites)}", "contributed / known"),
            ("Tokens", count(history.tokens()), "in committed updates"),
            ("Received", size(history.bytes_up()), "from all sites"),
            ("Sent", size(history.bytes_down()), "to all sites"),
            ("Time", duration(history.elapsed_seconds()), "first start to last event"),
            *_privacy_tile(history),
        ]
    )


def _privacy_tile(history: History) -> list[tuple[str, str, str]]:
    if "epsilon" not in history.privacy:
        return []
    spent = f"delta {history.privacy.get('delta', 0.0):g}, {len(history.privacy_releases)} releases, per site"
    return [("Privacy, epsilon", f"{history.privacy['epsilon']:.3g}", spent)]


def _ledger(run: Path) -> list[dict[str, Any]]:
    """The rows of contributions; a damaged ledger is the verifier's to name and costs only its columns here."""
    from umbel.ledger.contributions import contributions

    try:
        return contributions(run)
    except (KeyError, TypeError, ValueError, OSError):
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
