"""S1: a federation under constant faults against the same federation left alone.

    python -m benchmarks.chaos --minutes 10 --json          make chaos

Four SuperNodes on loopback fine-tune the built-in tiny GPT-2. First without faults, for as many rounds as fit into
the minutes asked for; then the same number of rounds with a fault every 20 s from a list in an order fixed by the
seed: kill a SuperNode and start it again, stop one for 15 s, kill a site's worker, kill a site's SuperExec and
restart the node, and a link that loses its connections. Reported:

    throughput_retained   trained tokens a second in committed rounds, faults / no faults         (>= 0.85)
    final_loss_relative   final held-out loss, faults / no faults - 1                             (within 0.02)
    longest_round_seconds against the watchdog of three deadlines: a hang fails the run
    monotone              no rise of the 5-round mean of the training loss by more than 1 %

The log of one full run lies beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SITES = {"ant": "demo:clinic", "bee": "demo:kitchen", "cat": "demo:workshop", "dog": "demo:clinic"}
DEADLINE, EVERY_SECONDS, PAUSE_SECONDS = 60.0, 20.0, 15.0
FAULTS = ("kill", "pause", "worker", "superexec", "reset")
SETTINGS = [
    "run.seed=11",
    "run.max-consecutive-skips=10",
    "model.name=builtin:tiny-gpt2",
    "clients.minimum=4",
    "clients.quorum=2",
    f"clients.deadline-seconds={DEADLINE:g}",
    "clients.grace-seconds=5",
    "train.local-steps=4",
    "train.threads=1",
    "train.learning-rate=0.003",
    "train.schedule=constant",
    "data.max-length=128",
    "eval.every=0",
    "telemetry.report=false",
    "telemetry.keep-updates=true",
]


class Monkey(threading.Thread):
    """Does one fault after another until told to stop; each is written down with its time."""

    def __init__(self, federation: Any, link: Any, seed: int) -> None:
        super().__init__(daemon=True)
        from umbel.seeds import generator

        self.federation, self.link, self.done = federation, link, threading.Event()
        self.log: list[dict[str, Any]] = []
        self._random = generator(seed, "chaos")

    def run(self) -> None:
        while not self.done.wait(EVERY_SECONDS):
            fault = FAULTS[int(self._random.integers(len(FAULTS)))]
            site = sorted(SITES)[int(self._random.integers(len(SITES)))]
            entry = {"t": round(time.time(), 1), "fault": fault, "site": "bee" if fault == "reset" else site}
            self.log.append(entry)
            print(json.dumps(entry), flush=True)
            try:
                getattr(self, f"_{fault}")(site)
            except Exception as error:
                entry["error"] = f"{type(error).__name__}: {error}"

    def _kill(self, site: str) -> None:
        self.federation.kill(site)
        time.sleep(2.0)
        self.federation.start_site(site)

    def _pause(self, site: str) -> None:
        self.federation.kill(site, signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        self.federation.kill(site, signal.SIGCONT)

    def _worker(self, site: str) -> None:
        import psutil

        state = str(self.federation.state / site)
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or [])
            if "client_app.resident.worker" in words and (state in words or f" {site}" in words):
                os.kill(process.pid, signal.SIGKILL)

    def _superexec(self, site: str) -> None:
        import psutil

        node = psutil.Process(self.federation.processes[site].pid)
        for child in node.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "flower-superexec" in " ".join(child.cmdline()):
                    child.kill()
        time.sleep(2.0)
        self._kill(site)

    def _reset(self, site: str) -> None:
        self.link.reset_all()


def run_once(folder: Path, rounds: int, *, chaos: bool, limit_seconds: float) -> dict[str, Any]:
    """Return what one run reached."""
    from support.federation import Federation
    from support.proxy import Proxy

    from server_app.checker import check_run, commits

    with Federation(folder, {}) as f, Proxy(f.port) as link:
        f.sites, f.site_ports = SITES, {"bee": link.port}
        for site in SITES:
            f.start_site(site)
        monkey = Monkey(f, link, seed=11)
        run_id = f.start(*SETTINGS, f"run.rounds={rounds}", f"run.output-dir={folder / 'run'}")
        f.until(lambda e: e["event"] == "round_committed", seconds=300)
        if chaos:
            monkey.start()
        hang = ""
        try:
            status = f.wait(run_id, seconds=limit_seconds)
        except AssertionError:
            status, hang = "hang", "the run did not end in time"
        monkey.done.set()
        if chaos:
            monkey.join(60)
        events = f.events()
    done = commits(events)
    tokens = sum(r["tokens"] for r in done[1:])
    span = done[-1]["t"] - done[0]["t"] if len(done) > 1 else float("nan")
    losses = [r["train_loss"] for r in done]
    means = [statistics.fmean(losses[i : i + 5]) for i in range(max(0, len(losses) - 4))]
    evaluated = [e["loss"] for e in events if e["event"] == "evaluated"]
    return {
        "status": status,
        "hang": hang,
        "rounds": len(done),
        "skips": sum(e["event"] == "round_committed" and e["outcome"] != "commit" for e in events),
        "updates": sum(len(r["accepted"]) for r in done),
        "tokens_per_second": tokens / span,
        "seconds": round(span, 1),
        "final_loss": evaluated[-1] if evaluated else None,
        "longest_round_seconds": max(r["seconds"]["total"] for r in done),
        "monotone": all(b <= a * 1.01 for a, b in itertools.pairwise(means)),
        "checker": check_run(folder / "run", slack_seconds=20.0),
        "faults": monkey.log,
    }


def main() -> int:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the run without faults")
    parser.add_argument("--rounds", type=int, default=0, help="rounds instead of minutes")
    arguments = parser.parse_args()
    limit = arguments.minutes * 60.0
    with tempfile.TemporaryDirectory(prefix="umbel-chaos-") as scratch:
        rounds = arguments.rounds
        if not rounds:
            # Two rounds tell how many fit; the first one loads the models.
            probe = run_once(Path(scratch) / "probe", 4, chaos=False, limit_seconds=600.0)
            rounds = max(6, int(limit / (probe["seconds"] / max(1, probe["rounds"] - 1))))
        calm = run_once(Path(scratch) / "calm", rounds, chaos=False, limit_seconds=3 * limit + 300)
        wild = run_once(Path(scratch) / "wild", rounds, chaos=True, limit_seconds=3 * limit + 300)
    result = {
        "rounds": rounds,
        "throughput_retained": round(wild["tokens_per_second"] / calm["tokens_per_second"], 4),
        "final_loss_relative": round((wild["final_loss"] or 1e9) / calm["final_loss"] - 1.0, 4),
        "no_hang": not wild["hang"] and wild["longest_round_seconds"] <= 3 * DEADLINE,
        "monotone": wild["monotone"],
        "num_faults": len(wild["faults"]),
        "calm": calm,
        "wild": wild,
    }
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=1))
    good = result["throughput_retained"] >= 0.85 and abs(result["final_loss_relative"]) <= 0.02
    return 0 if good and result["no_hang"] and not wild["checker"] else 1


if __name__ == "__main__":
    sys.exit(main())
