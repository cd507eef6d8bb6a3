"""`umbel ls` and `umbel show`: finished and running runs as tables; plain aligned text when piped.

All numbers are those of `umbel.telemetry.history`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from umbel.telemetry.events import scan_events
from umbel.telemetry.history import History
from umbel.telemetry.runfolder import RunFolder, list_runs, runs_root
from umbel.telemetry.units import DASH, change, count, duration, loss, moment, one_line, size
from umbel.telemetry.verdict import certificate, verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Wide enough that no column of ours is cut when the output goes to a file.
_PIPE_WIDTH = 400


def list_runs_table(root: str | os.PathLike[str] | None = None, *, console: Console | None = None) -> int:
    """Print the runs under `root` (default: `runs_root()`), the newest first; returns 0."""
    out = console or make_console()
    rows = [_run_row(run) for run in list_runs(root)]
    if not rows:
        place = os.fspath(root) if root is not None else str(runs_root())
        out.print(f"No runs in {place}.", markup=False, highlight=False)
        return 0
    header = ["Run", "State", "Rounds", "Held-out loss", "Change", "Sites", "Up", "Down", "Time", "Started"]
    out.print(make_table(out, "", header, rows, right={4, 6, 7}))
    return 0


def show_run(run_dir: str | os.PathLike[str], *, console: Console | None = None, last: int = 0) -> int:
    """Print verdict, rounds (the `last` ones; 0 = all), sites and refusals; DataError without a run."""
    out = console or make_console()
    folder = RunFolder.open(run_dir)
    events, unreadable = scan_events(folder.events_jsonl)
    history = History.from_events(events)
    lines = [
        f"{history.run or folder.name}: {history.outcome}"
        + (f" ({history.reason})" if history.reason else ""),
        f"{history.method or DASH}, {history.model or DASH}, {history.task or DASH}",
        verdict(history),
        certificate(history),
        f"{unreadable} line(s) of the event log could not be read." if unreadable else "",
    ]
    for line in filter(None, lines):
        out.print(one_line(line), markup=False, highlight=False)
    for table in (rounds_table(out, history, last), sites_table(out, history), refusals_table(out, history)):
        if table is not None:
            out.print()
            out.print(table)
    if folder.report_html.is_file():
        out.print(f"\nReport: {folder.report_html}", markup=False, highlight=False)
    return 0


def rounds_table(out: Console, history: History, last: int = 0) -> Table | None:
    """The rounds in the order they were opened."""
    held = dict(history.heldout_curve())
    rows = [
        [
            f"{row.round}" + (f".{row.attempt}" if row.attempt > 1 else ""),
            row.outcome,
            f"{len(row.accepted or row.updates)}/{len(row.selected)}",
            str(row.num_late),
            str(len(row.dropped)),
            loss(row.train_loss),
            loss(held.get(row.round)),
            size(row.bytes_up),
            size(row.bytes_down),
            duration(row.total_seconds),
            "; ".join(f"{s}: {row.why(s) or 'no answer'}" for s in row.dropped),
        ]
        for row in history.rounds[-last if last > 0 else 0 :]
    ]
    header = [
        "Round",
        "Outcome",
        "Sites",
        "Late",
        "Lost",
        "Train",
        "Held-out",
        "Up",
        "Down",
        "Time",
        "Why lost",
    ]
    return make_table(out, "Rounds", header, rows, right={0, 3, 4, 5, 6, 7, 8, 9}) if rows else None


def sites_table(out: Console, history: History) -> Table | None:
    """Who gave what."""
    given, rows = history.contributions(), []
    for name in sorted(history.sites):
        site, (rounds, tokens) = history.sites[name], given.get(name, (0, 0))
        first, last = history.first_last_heldout(name)
        shown = [name, count(site.rows_train), str(rounds), count(tokens), count(site.tokens_per_second)]
        shown += [
            size(site.bytes_up),
            size(site.bytes_down),
            loss(first),
            loss(last),
            change(last, first) or DASH,
        ]
        rows.append(shown)
    header = [
        "Site",
        "Rows",
        "Rounds",
        "Tokens",
        "Tokens/s",
        "Up",
        "Down",
        "Held-out first",
        "last",
        "Change",
    ]
    return make_table(out, "Sites", header, rows, right=set(range(1, 10))) if rows else None


def refusals_table(out: Console, history: History) -> Table | None:
    """Sites and updates that were not taken; the last 20."""
    rows = [
        ["joining" if r.round is None else str(r.round), r.site, r.kind, r.reason or DASH]
        for r in history.refused[-20:]
    ]
    header = ["Round", "Site", "Kind", "Reason"]
    return make_table(out, "Refusals", header, rows) if rows else None


def make_console() -> Console:
    """A console on standard output; wide when that is not a terminal, so that nothing is cut."""
    import sys

    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


def make_table(
    out: Console, title: str, header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()
) -> Table:
    """A table whose cells are literal text: no markup and no control code of a site's is obeyed."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD if out.is_terminal else None,
        pad_edge=False,
    )
    numeric = set(right)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    return table


def _run_row(run: RunFolder) -> list[str]:
    history = History.read(run.events_jsonl)
    first, last = history.first_last_heldout()
    return [
        run.name,
        history.outcome if history.num_starts else "not started",
        f"{len(history.committed)}/{history.num_rounds or DASH}",
        f"{loss(first)} -> {loss(last)}" if last is not None else loss(first),
        change(last, first) or DASH,
        f"{len(history.contributions())}/{len(history.sites)}",
        size(history.bytes_up()),
        size(history.bytes_down()),
        duration(history.elapsed_seconds()),
        moment(history.started_at),
    ]
