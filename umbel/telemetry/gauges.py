"""The names of everything a /metrics endpoint shows, and how each is computed. Nothing is served here.

One table, so that the Grafana board, the alert rules and the documentation can be checked against it. Names follow
Prometheus: base units, `_total` for counters. `server_values` computes from a run's history, `site_values` from the
records on a site's disk; both yield (name, labels, value).
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from umbel.telemetry.history import History
from umbel.telemetry.records import number


class Metric(NamedTuple):
    """One exported family: gauge or counter, its labels and what it says."""

    kind: str
    labels: tuple[str, ...]
    help: str


Value = tuple[str, tuple[str, ...], float]

SERVER: dict[str, Metric] = {
    "umbel_run_info": Metric("gauge", ("run", "method", "model"), "1 for the run this server works on"),
    "umbel_run_finished": Metric("gauge", ("outcome",), "1 when the run has ended"),
    "umbel_rounds_committed_total": Metric("counter", (), "committed rounds that stand"),
    "umbel_rounds_wanted": Metric("gauge", (), "rounds the run was asked for"),
    "umbel_rounds_skipped_total": Metric("counter", (), "attempts that brought no commit"),
    "umbel_round_seconds": Metric(
        "gauge", ("phase",), "last closed round: total, load, train, eval, encode, wait"
    ),
    "umbel_seconds_since_commit": Metric("gauge", (), "time since the last committed round, or the start"),
    "umbel_train_loss": Metric("gauge", (), "training loss of the last committed round, nats a token"),
    "umbel_heldout_loss": Metric("gauge", ("where",), "newest held-out loss: sites or server, nats a token"),
    "umbel_site_heldout_loss": Metric("gauge", ("site",), "newest held-out loss of a site, nats a token"),
    "umbel_sites": Metric(
        "gauge", ("state",), "sites: joined, asked in the newest round, accepted in the last commit"
    ),
    "umbel_bytes_total": Metric("counter", ("direction",), "payload bytes: up from the sites, down to them"),
    "umbel_updates_total": Metric(
        "counter", ("site", "result"), "updates by site: accepted, late, rejected, failed, missing"
    ),
    "umbel_refusals_total": Metric("counter", ("kind",), "refusals of sites and updates by kind"),
    "umbel_tokens_total": Metric("counter", ("site",), "tokens trained in committed rounds"),
    "umbel_residual_ratio": Metric(
        "gauge", ("site",), "what a lossy codec holds back: |residual| / |change|"
    ),
    "umbel_exactness_error": Metric(
        "gauge", (), "distance of the served adapter from the mean of products, last commit"
    ),
    "umbel_checkpoint_round": Metric("gauge", (), "round of the newest checkpoint"),
}

SITE: dict[str, Metric] = {
    "umbel_site_info": Metric("gauge", ("site",), "1 for each site whose state lies here"),
    "umbel_site_answers_total": Metric("counter", ("site", "kind", "status"), "answers by kind and status"),
    "umbel_site_bytes_total": Metric(
        "counter", ("site", "direction"), "payload bytes: up to the server, down from it"
    ),
    "umbel_site_tokens_total": Metric("counter", ("site",), "tokens trained here"),
    "umbel_site_round": Metric("gauge", ("site",), "round of the last update"),
    "umbel_site_loss": Metric("gauge", ("site",), "training loss of the last update, nats a token"),
    "umbel_site_round_seconds": Metric("gauge", ("site",), "time from message to answer, last update"),
    "umbel_site_seconds_since_answer": Metric("gauge", ("site",), "time since the last answer left"),
    "umbel_site_residual_ratio": Metric(
        "gauge", ("site",), "what a lossy codec holds back: |residual| / |change|"
    ),
    "umbel_site_refused_by_policy_total": Metric(
        "counter", ("site",), "messages that the site's policy refused"
    ),
    "umbel_site_busy": Metric("gauge", ("site",), "1 while the resident worker serves a message"),
    "umbel_site_memory_bytes": Metric("gauge", ("site",), "resident memory of the worker"),
    "umbel_site_tokens_a_second": Metric("gauge", ("site",), "speed of the work that goes on"),
}

GPU: dict[str, Metric] = {
    "umbel_gpu_utilization_ratio": Metric("gauge", ("gpu", "name"), "share of time a GPU was busy"),
    "umbel_gpu_memory_used_bytes": Metric("gauge", ("gpu", "name"), "memory in use"),
    "umbel_gpu_memory_total_bytes": Metric("gauge", ("gpu", "name"), "memory there is"),
}

_GPU_QUERY = "index,name,utilization.gpu,memory.used,memory.total"


def server_values(history: History, now: float) -> Iterator[Value]:
    """Yield every server value that is known; `now` in unix seconds."""
    if history.num_starts:
        yield "umbel_run_info", (history.run, history.method, history.model), 1
    if history.finished:
        yield "umbel_run_finished", (history.outcome,), 1
    committed = history.committed
    yield "umbel_rounds_committed_total", (), len(committed)
    if history.num_rounds is not None:
        yield "umbel_rounds_wanted", (), history.num_rounds
    yield "umbel_rounds_skipped_total", (), sum(r.outcome in ("skip", "abort") for r in history.rounds)
    closed = [r for r in history.rounds if not r.open]
    if closed:
        if closed[-1].total_seconds is not None:
            yield "umbel_round_seconds", ("total",), closed[-1].total_seconds
        for phase, seconds in closed[-1].time_split().items():
            yield "umbel_round_seconds", (phase,), seconds
    since = history.last_commit_at or history.started_at
    if since is not None and not history.finished:
        yield "umbel_seconds_since_commit", (), max(0.0, now - since)
    yield from _losses(history)
    yield "umbel_sites", ("joined",), sum(s.joined for s in history.sites.values())
    yield "umbel_sites", ("asked",), len(history.rounds[-1].selected) if history.rounds else 0
    yield "umbel_sites", ("accepted",), len(committed[-1].accepted) if committed else 0
    yield "umbel_bytes_total", ("up",), history.bytes_up()
    yield "umbel_bytes_total", ("down",), history.bytes_down()
    yield from _counts(history)
    if committed and committed[-1].exactness_error is not None:
        yield "umbel_exactness_error", (), committed[-1].exactness_error
    if history.checkpoint_round is not None:
        yield "umbel_checkpoint_round", (), history.checkpoint_round


def _losses(history: History) -> Iterator[Value]:
    train = history.train_curve()
    if train:
        yield "umbel_train_loss", (), train[-1][1]
    for where in ("sites", "server"):
        curve = history.heldout_curve(where)
        if curve:
            yield "umbel_heldout_loss", (where,), curve[-1][1]
    if history.heldout:
        for site, loss in sorted(history.site_heldout(max(history.heldout)).items()):
            yield "umbel_site_heldout_loss", (site,), loss


def _counts(history: History) -> Iterator[Value]:
    for site in sorted(history.sites):
        results = Counter(row.participation(site) for row in history.rounds)
        for result in ("accepted", "late", "rejected", "failed", "missing"):
            yield "umbel_updates_total", (site, result), results[result]
    for kind, times in sorted(Counter(r.kind for r in history.refused).items()):
        yield "umbel_refusals_total", (kind,), times
    for site, (_, tokens) in sorted(history.contributions().items()):
        yield "umbel_tokens_total", (site,), tokens
    for row in reversed(history.committed):
        ratios = {s: number(u.get("residual_ratio")) for s, u in sorted(row.updates.items())}
        for site, ratio in ratios.items():
            if ratio is not None:
                yield "umbel_residual_ratio", (site,), ratio
        break


def site_values(state_dir: Path, now: float) -> Iterator[Value]:
    """Yield the values of every site whose records lie in a state folder."""
    for path in sorted(state_dir.glob("*.counters.json")):
        totals = read_json(path)
        site = str(totals.get("site") or path.name.removesuffix(".counters.json"))
        yield "umbel_site_info", (site,), 1
        refused = 0.0
        for name, times in sorted(_mapping(totals.get("answers")).items()):
            kind, _, status = str(name).rpartition(":")
            yield "umbel_site_answers_total", (site, kind, status), number(times) or 0
            refused += (number(times) or 0) if status == "policy" else 0
        yield "umbel_site_refused_by_policy_total", (site,), refused
        for direction in ("up", "down"):
            yield "umbel_site_bytes_total", (site, direction), number(totals.get(f"bytes_{direction}")) or 0
        yield "umbel_site_tokens_total", (site,), number(totals.get("tokens")) or 0
        update, last = _mapping(totals.get("update")), _mapping(totals.get("last"))
        for metric, value in (
            ("umbel_site_round", update.get("round")),
            ("umbel_site_loss", update.get("loss")),
            ("umbel_site_round_seconds", update.get("seconds")),
            ("umbel_site_residual_ratio", update.get("residual_ratio")),
            (
                "umbel_site_seconds_since_answer",
                None if number(last.get("t")) is None else max(0.0, now - last["t"]),
            ),
        ):
            if number(value) is not None:
                yield metric, (site,), float(value)  # type: ignore[arg-type]
    yield from _workers(state_dir)


def _workers(state_dir: Path) -> Iterator[Value]:
    for path in sorted((state_dir / ".resident").glob("*.json")):
        facts = read_json(path)
        site = str(facts.get("site") or "")
        if not site:
            continue
        yield "umbel_site_busy", (site,), 1 if facts.get("busy") else 0
        for metric, key in (
            ("umbel_site_memory_bytes", "memory_bytes"),
            ("umbel_site_tokens_a_second", "tokens_per_second"),
        ):
            if number(facts.get(key)) is not None:
                yield metric, (site,), float(facts[key])


class Gpus:
    """What nvidia-smi says, asked at most every `every_seconds`; nothing on a machine without it."""

    def __init__(self, every_seconds: float = 10.0) -> None:
        self._every, self._asked, self._known = every_seconds, float("-inf"), []  # type: ignore[var-annotated]

    def values(self) -> list[Value]:
        if time.monotonic() - self._asked >= self._every:
            self._asked, self._known = time.monotonic(), list(gpu_values(self._answer()))
        return self._known

    @staticmethod
    def _answer() -> str:
        command = shutil.which("nvidia-smi")
        if command is None:
            return ""
        query = [command, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""


def gpu_values(text: str) -> Iterator[Value]:
    """Yield the values in nvidia-smi's CSV (percent and MiB)."""
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) != 5:
            continue
        index, name, busy, used, total = row
        for metric, value, unit in (
            ("umbel_gpu_utilization_ratio", busy, 0.01),
            ("umbel_gpu_memory_used_bytes", used, 2.0**20),
            ("umbel_gpu_memory_total_bytes", total, 2.0**20),
        ):
            try:
                yield metric, (index, name), float(value) * unit
            except ValueError:
                # "[N/A]": shared memory, or a partition of a GPU.
                continue


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, {} for anything else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
