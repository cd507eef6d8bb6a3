"""GPT-2 Medium between two loopback sites: three real rounds, bytes predicted and measured, the server's peak memory.

    python -m benchmarks.gpt2_medium --json [--model config:gpt2-medium] [--rounds 3] [--set key=value]

The recipe `recipes/gpt2-medium.toml` over a real federation (SuperLink, two SuperNodes, `flwr run`). Predicted are the
frames of `umbel plan` (steady state, round 2 on); measured are the lengths the server counted in its event log. The
peak resident set of the ServerApp's process is read from /proc every 0.2 s; allowed are 3 x 4 bytes x parameters and
two payloads (the larger of up and down). A few small steps: nothing is claimed about loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

RECIPE = ROOT / "recipes" / "gpt2-medium.toml"


class PeakOf(threading.Thread):
    """Largest VmHWM of any process whose command line holds a word and our folder's SuperLink."""

    def __init__(self, word: str, ours: str) -> None:
        super().__init__(daemon=True)
        self.word, self.ours, self.peak, self.stop = word, ours, 0, False

    def run(self) -> None:
        while not self.stop:
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, ValueError):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if self.word in command and self.ours in command:
                        status = (folder / "status").read_text()
                        line = next(x for x in status.splitlines() if x.startswith("VmHWM"))
                        self.peak = max(self.peak, 1024 * int(line.split()[1]))
            time.sleep(0.2)


def measure(model: str, rounds: int, more: list[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Run the recipe and return the figures."""
    from support.federation import Federation

    from umbel.cli.flower import start_run
    from umbel.cli.plan import with_real_frames
    from umbel.config import resolve, to_toml

    settings = [
        f"model.name={model}",
        f"run.rounds={rounds}",
        f"run.output-dir={folder / 'run'}",
        f"clients.deadline-seconds={seconds / rounds}",
        f"clients.grace-seconds={seconds / rounds / 2}",
        "telemetry.report=false",
        *more,
    ]
    config = resolve(RECIPE, settings)
    plan = with_real_frames([config])[0]
    text = folder / "text.txt"
    text.write_text(json.__doc__ * 40 if json.__doc__ else "x")
    (folder / "resolved.toml").write_text(to_toml(config))
    with Federation(folder, {"north": str(text), "south": str(text)}) as f:
        watch = PeakOf("flwr-serverapp", str(f.port))
        watch.start()
        began = time.monotonic()
        run_id = start_run(f.app, "loopback", folder / "resolved.toml", env=f.env)
        status = f.wait(run_id, seconds=seconds)
        watch.stop = True
        took = time.monotonic() - began
        events = f.events()
    if status != "finished:completed":
        raise SystemExit(f"{status}: {(folder / 'run/server.log').read_text()[-3000:]}")
    rows = [e for e in events if e["event"] == "round_committed" and e["outcome"] == "commit"]
    peaks = [e["peak_memory_bytes"] for e in events if e["event"] == "update_accepted"]
    return {**figures(plan, rows, watch.peak, took), "site_peak_bytes": max(peaks)}


def figures(plan: dict[str, Any], rows: list[dict[str, Any]], peak: int, took: float) -> dict[str, Any]:
    """Return what is printed, from the plan and the records of the rounds."""
    n = plan["trainable_parameters"]
    up = [row["bytes_up"] for row in rows]
    down = [row["bytes_down"] for row in rows]
    want_up = [sum(r["up"].values()) for r in plan["rounds"]]
    want_down = [sum(r["down"].values()) for r in plan["rounds"]]
    payload = max(max(up), max(down)) // 2
    return {
        "model": plan["model"],
        "parameters": n,
        "full_exchange_bytes": plan["base_bytes"],
        "rounds": len(rows),
        "bytes_up": up,
        "bytes_up_predicted": want_up,
        "bytes_down": down,
        "bytes_down_predicted": want_down,
        "bytes_error_up": max(abs(a / b - 1) for a, b in zip(up, want_up, strict=True)),
        "bytes_error_down": max(abs(a / b - 1) for a, b in zip(down, want_down, strict=True)),
        "times_fewer_up": 2 * plan["base_bytes"] / up[-1],
        "server_peak_bytes": peak,
        "server_allowed_bytes": 12 * n + 2 * payload,
        "server_ratio": peak / (12 * n + 2 * payload),
        "seconds_a_round": [row["seconds"]["total"] for row in rows],
        "seconds": took,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="config:gpt2-medium")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="more")
    parser.add_argument("--seconds", type=float, default=3000.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.model, options.rounds, options.more, Path(folder), options.seconds)
    print(json.dumps(found) if options.json else "\n".join(f"{k:>24}  {v}" for k, v in found.items()))


if __name__ == "__main__":
    main()
