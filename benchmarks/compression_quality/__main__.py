"""Loss against bits: tiny pretraining and tiny LoRA with every recipe of codec and residual, over several seeds.

    python -m benchmarks.compression_quality --json
    python -m benchmarks.compression_quality --tasks lora --seeds 5 --out lines.jsonl     (goes on where it stopped)

Everything is real but the network: round engine, sites, codecs, error feedback. All arms of a seed see the same rows in
the same order. `gap` is the mean over the seeds of (loss - loss of dense with the same seed); `noise` is the larger of
the standard deviations of the dense losses and of the gaps over the seeds. A gap within the noise says nothing, and
the verdict then is "within noise". The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compression_quality.tasks import COMMON, SETTINGS, sites
from benchmarks.inprocess import run_in_process
from client_app.service import Service
from umbel.config import resolve

# name: (policy, decay of the residual). Small tensors are coded too: those of a tiny model are all small.
ARMS: dict[str, tuple[str, float]] = {
    "dense": ("exact", 0.0),
    "bf16": ("bf16", 0.0),
    "int8": ("int8(256,rtn)", 0.0),
    "int4": ("int4(64,rtn)", 0.0),
    "ecsq 4": ("ecsq(rate=4.0)", 0.0),
    "ecsq 2": ("ecsq(rate=2.0)", 0.0),
    "2-bit rotation": ("had(256)|lm2(unbiased)", 0.0),
    "2-bit rotation + residual": ("had(256)|lm2", 0.95),
    "2-bit int2 + residual": ("int2(64,rtn)", 1.0),
    "sign + residual": ("sign(256)", 1.0),
    "sign alone": ("sign(256)", 0.0),
    "sparse + residual": ("topk(256,8)|sign2|rice", 0.95),
    "ecsq .5 + residual": ("ecsq(rate=0.5)", 0.95),
}
MIN_VALUES = 256
Line = dict[str, Any]


def run(task: str, arm: str, seed: int, arguments: argparse.Namespace, service: Service) -> Line:
    """Train once and return the final held-out loss and the bits a value of the updates."""
    policy, feedback = ARMS[arm]
    up = policy if policy == "exact" else f"{policy};min={MIN_VALUES}"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        config = resolve(
            None,
            [
                *COMMON,
                *SETTINGS[task],
                f"run.seed={seed}",
                f"run.rounds={arguments.rounds}",
                f"train.local-steps={arguments.local_steps}",
                f"compression.up={up}",
                f"compression.feedback={feedback}",
                f"run.output-dir={root / 'run'}",
            ],
        )
        session = run_in_process(config, sites(task, root), service)
    history = session.history
    values = session.start.layout.numel * sum(len(r.accepted) for r in history.committed)
    ratios = [
        u["residual_ratio"] for r in history.committed for u in r.updates.values() if u.get("residual_ratio")
    ]
    return {
        "task": task,
        "arm": arm,
        "seed": seed,
        "policy": up,
        "feedback": feedback,
        "rounds": arguments.rounds,
        "local_steps": arguments.local_steps,
        "loss": history.heldout_curve()[-1][1],
        "bits": 8 * history.bytes_up() / values,
        "bytes_up": history.bytes_up(),
        "residual_ratio": statistics.fmean(ratios) if ratios else None,
        "seconds": round(time.monotonic() - start, 1),
    }


def summary(lines: Sequence[Line], task: str) -> list[Line]:
    """Return one row an arm: mean loss and bits, gap to dense with the same seeds, noise and verdict."""
    by = {(x["arm"], x["seed"]): x for x in lines if x["task"] == task}
    dense = {seed: x["loss"] for (arm, seed), x in by.items() if arm == "dense"}
    spread = statistics.stdev(dense.values()) if len(dense) > 1 else float("nan")
    rows = []
    for arm in ARMS:
        seeds = [s for s in sorted(dense) if (arm, s) in by]
        if not seeds:
            continue
        gaps = [by[arm, s]["loss"] - dense[s] for s in seeds]
        noise = max(spread, statistics.stdev(gaps)) if len(seeds) > 1 else float("nan")
        gap = statistics.fmean(gaps)
        verdict = "reference" if arm == "dense" else judged(gap, noise)
        losses = [by[arm, s]["loss"] for s in seeds]
        rows.append(
            {
                "arm": arm,
                "policy": by[arm, seeds[0]]["policy"],
                "feedback": by[arm, seeds[0]]["feedback"],
                "seeds": len(seeds),
                "bits": statistics.fmean(by[arm, s]["bits"] for s in seeds),
                "loss": statistics.fmean(losses),
                "loss_sd": statistics.stdev(losses) if len(losses) > 1 else None,
                "gap": gap,
                "noise": noise,
                "verdict": verdict,
            }
        )
    return rows


def judged(gap: float, noise: float) -> str:
    """Return what a gap says: nothing within the noise."""
    if not abs(gap) > noise:
        return "within noise"
    return "worse" if gap > 0 else "better"


def table(rows: Sequence[Line]) -> list[str]:
    """Return the rows as Markdown."""
    lines = ["| arm | codec | residual | bits | loss | gap to dense | noise | verdict |", "|" + "---|" * 8]
    for r in rows:
        spread = f" +- {r['loss_sd']:.4f}" if r["loss_sd"] is not None else ""
        policy = r["policy"].replace("|", "\\|")
        lines.append(
            f"| {r['arm']} | `{policy}` | {r['feedback'] or '-'} | {r['bits']:.3f} | {r['loss']:.4f}{spread} "
            f"| {r['gap']:+.4f} | {r['noise']:.4f} | {r['verdict']} |"
        )
    return lines


def main() -> None:
    """Run what is missing and print the tables and one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default=",".join(SETTINGS))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--local-steps", type=int, default=6)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="start nothing new after this long; 0: no limit"
    )
    parser.add_argument("--out", default="", help="file of finished lines; it is continued")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    out = Path(arguments.out) if arguments.out else None
    lines: list[Line] = []
    if out is not None and out.exists():
        same = (arguments.rounds, arguments.local_steps)
        known = (json.loads(text) for text in out.read_text().splitlines() if text)
        lines = [x for x in known if (x["rounds"], x["local_steps"]) == same]
    done = {(x["task"], x["arm"], x["seed"]) for x in lines}
    service, began = Service(), time.monotonic()
    for task in arguments.tasks.split(","):
        for seed in range(42, 42 + arguments.seeds):
            for arm in arguments.arms.split(","):
                late = arguments.minutes and time.monotonic() - began > 60 * arguments.minutes
                if late or (task, arm, seed) in done:
                    continue
                lines.append(run(task, arm, seed, arguments, service))
                if out is not None:
                    with open(out, "a") as handle:
                        handle.write(json.dumps(lines[-1]) + "\n")
                found = lines[-1]
                text = f"{task} seed {seed} {arm:26s} {found['bits']:7.3f} bits  loss {found['loss']:.4f}"
                print(f"{text}  {found['seconds']:.1f} s", file=sys.stderr, flush=True)
    result = {task: summary(lines, task) for task in arguments.tasks.split(",")}
    for task, rows in result.items():
        print(f"\n{task}\n")
        print("\n".join(table(rows)))
    if arguments.json:
        settings = {"rounds": arguments.rounds, "local_steps": arguments.local_steps}
        print(json.dumps({"settings": settings, **result}))


if __name__ == "__main__":
    main()
