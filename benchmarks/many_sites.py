"""A simulation of very many sites on one machine: does it complete, and does memory stay flat?

    python -m benchmarks.many_sites --json                      1,000 sites, 3 rounds, a toy model
    python -m benchmarks.many_sites --sites 8 --rounds 100 --json

Runs `umbel run` as a user would, with Flower's Ray backend, and looks once a second at the resident memory of every
process the run has. Processes are told apart by their kind: `server` (the one that runs the ServerApp), `actor` (those
that train). Growth is the median of the last tenth of the run over the median of the tenth after the first 100
accepted updates (or after a tenth of all, when there are fewer than 1,000), less one. Every site has rows of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = {
    "ray::": "actor",
    "flwr-simulation": "server",
    "flwr-serverapp": "server",
    "flower-superlink": "superlink",
}


def rows(path: Path, count: int) -> None:
    """Write short rows, no two alike."""
    with open(path, "w") as file:
        for i in range(count):
            file.write(json.dumps({"question": f"What is {i} plus 1?", "answer": f"It is {i + 1}."}) + "\n")


def memory(root: int) -> dict[str, list[int]]:
    """Return resident bytes of the processes below `root`, by kind."""
    import psutil

    found: dict[str, list[int]] = {}
    for process in psutil.Process(root).children(recursive=True):
        try:
            line = " ".join(process.cmdline())
            resident = process.memory_info().rss
        except psutil.Error:
            continue
        for part, kind in KINDS.items():
            if part in line:
                # A Ray process that waits for work says so in its name; only those that hold a model count.
                if kind != "actor" or ("IDLE" not in line and resident > 200 * 2**20):
                    found.setdefault(kind, []).append(resident)
                break
    return found


def watch(process: subprocess.Popen, events: Path) -> list[dict[str, Any]]:
    """Return one sample a second until the process ends: updates accepted so far, resident bytes by kind."""
    samples: list[dict[str, Any]] = []
    while process.poll() is None:
        time.sleep(1.0)
        accepted = events.read_text().count('"update_accepted"') if events.exists() else 0
        sizes = memory(process.pid)
        samples.append({"accepted": accepted} | {kind: max(found) for kind, found in sizes.items()})
    return samples


def growth(samples: list[dict[str, Any]], kind: str, total: int) -> float | None:
    """Return late over early memory of a kind, less one; None without enough samples."""
    begin = 100 if total >= 1000 else total // 10
    sizes = [s[kind] for s in samples if kind in s and s["accepted"] >= begin]
    if len(sizes) < 4:
        return None
    part = max(1, len(sizes) // 10)
    return statistics.median(sizes[-part:]) / statistics.median(sizes[:part]) - 1.0


def run(sites: int, rounds: int, steps: int) -> dict[str, Any]:
    """Run the simulation and return what was seen."""
    with tempfile.TemporaryDirectory(prefix="umbel-many-") as scratch:
        folder = Path(scratch)
        rows(folder / "rows.jsonl", 4 * sites)
        settings = {
            "run.rounds": rounds,
            "run.output-dir": folder / "run",
            "data.source": folder / "rows.jsonl",
            "data.partition": "iid",
            "data.max-length": 64,
            "data.heldout-fraction": 0.0,
            "train.local-steps": steps,
            "train.batch-size": 2,
            "train.threads": 1,
            "clients.minimum": sites,
            "clients.over-provision": 1.0,
            "clients.start-timeout-seconds": 36_000,
            "clients.deadline-seconds": 36_000,
            "eval.every": 0,
            "eval.final": "false",
            "simulation.sites": sites,
        }
        (folder / "r.toml").write_text('[run]\nname = "many"\n')
        command = [sys.executable, "-m", "umbel.cli.main", "run", str(folder / "r.toml")]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "UMBEL_STATE": str(folder / "state")}
        began = time.monotonic()
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
            samples = watch(process, folder / "run/events.jsonl")
        seconds = time.monotonic() - began
        if process.returncode:
            raise SystemExit((folder / "log").read_text("utf-8", "replace")[-3000:])
        events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    begun = {e["round"]: e["t"] for e in events if e["event"] == "round_opened"}
    ended = {e["round"]: e["t"] for e in events if e["event"] == "round_committed"}
    spent = [ended[r] - begun[r] for r in sorted(ended)]
    accepted = sum(1 for e in events if e["event"] == "update_accepted")
    kinds = {kind for sample in samples for kind in sample if kind != "accepted"}
    return {
        "sites": sites,
        "rounds_committed": len(ended),
        "updates_accepted": accepted,
        "seconds": seconds,
        "seconds_per_site": sum(spent) / max(1, accepted),
        "peak_bytes": {kind: max(s.get(kind, 0) for s in samples) for kind in sorted(kinds)},
        "growth": {kind: growth(samples, kind, sites * rounds) for kind in sorted(kinds)},
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    found = run(chosen.sites, chosen.rounds, chosen.steps) | {
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }
    print(json.dumps(found) if chosen.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
