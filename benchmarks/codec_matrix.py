"""The whole matrix method x codec for one round: in one process, or as real Flower simulations and federations.

    python -m benchmarks.codec_matrix --json                                 every cell in one process
    python -m benchmarks.codec_matrix --how simulation --cells carry:int8,ravan:ecsq
    python -m benchmarks.codec_matrix --how federation                       one federation, a run a cell

Checked in every cell: what was decoded has the names of the method's form; the bytes of `umbel plan` are those counted
(exactly where the codec's rate is fixed, else, in these tiny frames, to 15 %); what cannot work is refused in words. A
cell that fails is listed and the exit code is 1. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.cells import CODECS, NEEDED, SETTINGS, SITES, Codec, refusal, run_cell
from support.federation import Federation

from server_app.byte_plan import BytePlan
from umbel.config import resolve
from umbel.config.schema import METHODS

# What a run of one process is given by `make_session`, for the real ones.
REAL = ("run.seed=7", "train.learning-rate=0.01", "train.threads=1", "eval.every=0", "telemetry.report=false")
Found = dict[str, Any]


def in_process(method: str, codec: Codec, folder: Path) -> Found:
    """Run one cell without processes."""
    cell = run_cell(folder, method, codec)
    if cell.code:
        return {"code": cell.code, "reason": cell.reason}
    names = cell.sent == cell.named
    history = cell.session.history
    return {"code": 0, "names": names, "up": history.bytes_up(), "down": history.bytes_down()}


def settings(method: str, codec: Codec, folder: Path) -> list[str]:
    """Return the settings of a real run of a cell."""
    own = [f"run.method={method}", f"run.output-dir={folder}", *NEEDED.get(method, ())]
    return [*REAL, *SETTINGS, *codec.settings, *own]


def outcome(folder: Path) -> Found:
    """Read what a real run left behind."""
    path = folder / "summary.json"
    if not path.exists():
        return {"code": 1, "reason": "the run left no summary"}
    summary = json.loads(path.read_text())
    if summary["outcome"] != "completed":
        return {"code": summary["exit_code"] or 1, "reason": summary["reason"]}
    # The server decodes against the form's own names and refuses others: a commit means that they were right.
    return {"code": 0, "names": True, "up": summary["bytes_up"], "down": summary["bytes_down"]}


def simulated(method: str, codec: Codec, folder: Path) -> Found:
    """Run one cell as a Flower simulation."""
    folder.mkdir(parents=True)
    (folder / "r.toml").write_text("[simulation]\nsites = 2\n")
    sets = [part for value in settings(method, codec, folder / "run") for part in ("--set", value)]
    env = {**os.environ, "UMBEL_STATE": str(folder / "state"), "UMBEL_RUNS": str(folder / "runs")}
    command = [sys.executable, "-m", "umbel.cli.main", "run", str(folder / "r.toml"), *sets]
    subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=300, check=False)
    return outcome(folder / "run")


def judged(found: Found, method: str, codec: Codec, folder: Path) -> Found:
    """Compare a cell with the plan, or with the refusal that is wanted; `ok` says whether it is right."""
    if word := refusal(method, codec):
        return {**found, "ok": found["code"] == 78 and word in found["reason"]}
    if found["code"]:
        return {**found, "ok": False}
    config = resolve(None, settings(method, codec, folder))
    if config.clients.mode == "async":
        # A commit is one arrival there: what a round moves is not planned.
        return {**found, "ok": found["names"]}
    plan = BytePlan(config, SITES)
    report = plan.report()
    up, down = report["total_up_bytes"], report["total_down_bytes"]
    close = up == found["up"] if plan.exact else abs(up - found["up"]) <= 0.15 * found["up"]
    ok = found["names"] and close and down == found["down"]
    return {**found, "planned_up": up, "planned_down": down, "exact": plan.exact, "ok": ok}


def run_all(how: str, cells: list[tuple[str, str]], root: Path) -> list[Found]:
    """Run the cells and return one line each."""
    lines: list[Found] = []

    def add(method: str, name: str, found: Found) -> None:
        line = {"method": method, "codec": name, **judged(found, method, CODECS[name], root / "plan")}
        lines.append(line)
        short = {k: line[k] for k in ("up", "planned_up", "reason") if k in line}
        print(
            f"{'ok  ' if line['ok'] else 'FAIL'} {method:9s} {name:18s} {short}", file=sys.stderr, flush=True
        )

    if how == "federation":
        with Federation(root / "fed", {site: f"demo:{site}" for site in SITES}) as federation:
            for number, (method, name) in enumerate(cells):
                folder = root / f"run-{number}"
                run_id = federation.start(*settings(method, CODECS[name], folder))
                federation.wait(run_id, seconds=300)
                add(method, name, outcome(folder))
        return lines
    work = in_process if how == "process" else simulated
    for number, (method, name) in enumerate(cells):
        add(method, name, work(method, CODECS[name], root / f"cell-{number}"))
    return lines


def main() -> int:
    """Run the chosen cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--how", choices=("process", "simulation", "federation"), default="process")
    parser.add_argument("--cells", default="", help="method:codec pairs, comma separated; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    cells = [(m, c) for m in METHODS for c in CODECS]
    if arguments.cells:
        cells = [tuple(pair.split(":")) for pair in arguments.cells.split(",")]  # type: ignore[misc]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        lines = run_all(arguments.how, cells, Path(scratch))
    failed = [f"{x['method']} x {x['codec']}" for x in lines if not x["ok"]]
    counts = {
        "how": arguments.how,
        "cells": len(lines),
        "run": sum(not x["code"] for x in lines),
        "refused_in_words": sum(bool(x["code"]) and x["ok"] for x in lines),
        "failed": failed,
        "bytes_exactly_as_planned": sum(bool(x.get("exact")) and x["ok"] for x in lines),
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps({**counts, "lines": lines} if arguments.json else counts))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
