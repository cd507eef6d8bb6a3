"""metrics.csv: the numbers of a run in long form, for a spreadsheet or a plotting tool.

    round,split,metric,value
    3,train,loss,2.314
    3,heldout,loss,2.41          state after round 3; round 0 is the initial state
    3,heldout:clinic,loss,2.52   one site
    3,round,bytes_up,2100000     seconds_train, sites_accepted, ...

Written from the events at any time, always whole; a value that is not known has no line.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from umbel.fsio import write_atomic
from umbel.telemetry.history import History
from umbel.telemetry.records import RoundRow, number

COLUMNS = ("round", "split", "metric", "value")
_HELDOUT = ("loss", "token_accuracy", "perplexity", "tokens")


def metric_rows(history: History) -> Iterator[tuple[int, str, str, float]]:
    """Yield (round, split, metric, value) by round, committed rounds and evaluated states only."""
    rows = {row.round: row for row in history.committed}
    for index in sorted({*rows, *history.heldout, *history.server_heldout}):
        yield from rows_of(history, index, rows.get(index))


def rows_of(history: History, index: int, row: RoundRow | None) -> Iterator[tuple[int, str, str, float]]:
    """Yield what `metric_rows` yields for one round and the state after it."""
    if row is not None:
        yield from _round(row)
    yield from _state(index, "heldout", history.heldout.get(index, {}))
    for site, loss in sorted(history.site_heldout(index).items()):
        yield index, f"heldout:{site}", "loss", loss
    yield from _state(index, "server", history.server_heldout.get(index, {}))


def write_metrics(history: History, path: str | os.PathLike[str]) -> Path:
    """Replace the CSV file at `path` by the metrics of this history, atomically."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for index, split, metric, value in metric_rows(history):
        writer.writerow((index, split, metric, repr(value)))
    write_atomic(Path(path), out.getvalue().encode())
    return Path(path)


def _round(row: RoundRow) -> Iterator[tuple[int, str, str, float]]:
    if row.train_loss is not None:
        yield row.round, "train", "loss", row.train_loss
    yield row.round, "train", "tokens", row.tokens()
    yield row.round, "round", "sites_asked", len(row.selected)
    yield row.round, "round", "sites_accepted", len(row.accepted)
    yield row.round, "round", "sites_late", row.num_late
    yield row.round, "round", "sites_dropped", len(row.dropped)
    yield row.round, "round", "bytes_up", row.bytes_up
    yield row.round, "round", "bytes_down", row.bytes_down
    for phase, seconds in row.time_split().items():
        yield row.round, "round", f"seconds_{phase}", seconds
    if row.total_seconds is not None:
        yield row.round, "round", "seconds_total", row.total_seconds
    if row.exactness_error is not None:
        yield row.round, "round", "exactness_relative_error", row.exactness_error


def _state(index: int, split: str, values: Mapping[str, Any]) -> Iterator[tuple[int, str, str, float]]:
    for metric in _HELDOUT:
        value = number(values.get(metric))
        if value is not None:
            yield index, split, metric, value
