"""`umbel watch`: follow a run from its event log, in a live table on a terminal, a line a round elsewhere.

It only reads: ending it, by Ctrl-C too, leaves the run alone. It ends by itself when the run has finished.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from umbel.cli.show import make_console, make_table
from umbel.telemetry.console import footer, header, last_round_line, round_line
from umbel.telemetry.events import tail
from umbel.telemetry.history import History
from umbel.telemetry.records import number, whole
from umbel.telemetry.runfolder import RunFolder
from umbel.telemetry.units import DASH, change, count, duration, loss, one_line, size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_LAST_ROUNDS = 6


def watch(
    run_dir: str | os.PathLike[str],
    *,
    once: bool = False,
    interval_seconds: float = 1.0,
    console: Console | None = None,
) -> int:
    """Follow the run until it has finished; `once` prints the present state and returns.

    Returns 0, or the exit code of a run that failed (1 when it left none). Raises DataError without a run.
    """
    out = console or make_console()
    follower = Follower(RunFolder.open(run_dir))
    follower.read()
    try:
        if once:
            out.print(view(out, follower.history, time.time()))
        elif out.is_terminal:
            _follow_live(out, follower, interval_seconds)
        else:
            _follow_plain(out, follower, interval_seconds)
    except KeyboardInterrupt:
        out.print("Stopped watching; the run goes on.", markup=False)
        return 0
    if not follower.history.finished or follower.history.outcome == "completed":
        return 0
    return follower.history.exit_code or 1


class Follower:
    """A history that grows with its event log."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.history = History()
        self._offset = 0

    def read(self) -> list[dict]:
        """Take the events written since the last call, and return them."""
        events, self._offset = tail(self.folder.events_jsonl, self._offset)
        for event in events:
            self.history.add(event)
        return events


def _follow_live(out: Console, follower: Follower, interval_seconds: float) -> None:
    from rich.live import Live

    with Live(view(out, follower.history, time.time()), console=out, auto_refresh=False) as live:
        while not follower.history.finished:
            time.sleep(interval_seconds)
            follower.read()
            live.update(view(out, follower.history, time.time()), refresh=True)
    out.print(footer(follower.history), markup=False, highlight=False)


def _follow_plain(out: Console, follower: Follower, interval_seconds: float) -> None:
    out.print(header(follower.history), markup=False, highlight=False)
    line = last_round_line(follower.history)
    if line:
        out.print(line, markup=False, highlight=False)
    while not follower.history.finished:
        time.sleep(interval_seconds)
        follower.read()
        previous, line = line, last_round_line(follower.history)
        if line != previous:
            out.print(line, markup=False, highlight=False)
    out.print(footer(follower.history), markup=False, highlight=False)


def view(out: Console, history: History, now: float) -> RenderableType:
    """Everything on one screen; `now` in unix seconds."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(header(history)), _progress(history, now)]
    sites = open_round_table(out, history)
    if sites is not None:
        parts += [Text(""), sites]
    closed = [row for row in history.rounds if not row.open]
    if closed:
        parts.append(Text(""))
    for row in closed[-_LAST_ROUNDS:]:
        before = [r for r in history.committed if r.round < row.round]
        parts.append(Text(round_line(row, before[-1] if before else None, history.num_rounds)))
    for refused in history.refused[-3:]:
        where = "joining" if refused.round is None else f"round {refused.round}"
        parts.append(
            Text(one_line(f"refused {refused.site} ({where}): {refused.reason or refused.kind}"), "red")
        )
    return Group(*parts)


def _progress(history: History, now: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done, asked = len(history.committed), history.num_rounds or 0
    first, last = history.first_last_heldout()
    current = first if last is None else last
    moved = change(last, first)
    facts = [
        history.outcome,
        f"round {done}/{asked or DASH}",
        f"held-out {loss(current)}" + (f" ({moved})" if moved else ""),
        f"up {size(history.bytes_up())} down {size(history.bytes_down())}",
        f"time {duration(history.elapsed_seconds(now))}",
        f"left {duration(history.eta_seconds(now))}",
    ]
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=max(1, asked), completed=done, width=30), Text("  ".join(facts)))
    return grid


def open_round_table(out: Console, history: History) -> Table | None:
    """The sites of the open round and what is known of each; None between rounds."""
    row = history.open_round
    if row is None:
        return None
    rows = []
    for name in sorted({*row.selected, *row.updates}):
        update = row.updates.get(name, {})
        seconds = update.get("seconds")
        train = number(seconds.get("train")) if isinstance(seconds, dict) else None
        state = row.participation(name)
        rows.append(
            [
                name,
                "update in" if state == "accepted" else state,
                loss(number(update.get("loss"))),
                count(whole(update.get("tokens"))),
                size(whole(update.get("bytes"))),
                duration(train),
                row.why(name),
            ]
        )
    answered = len(row.updates) + len(row.lost)
    title = f"Round {row.round}: {answered} of {len(row.selected)} answered"
    return make_table(
        out, title, ["Site", "State", "Loss", "Tokens", "Up", "Train", "Why"], rows, right={2, 3, 4, 5}
    )
