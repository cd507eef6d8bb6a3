"""What lost updates cost: the held-out loss of a small run with 0, 25 and 50 % of the site-rounds dropped at random.

    python -m benchmarks.dropout_loss --json

Four sites of the built-in demo data train adapters of the built-in model in one process, with the usual cosine
schedule over all rounds, real ClientApp and round engine. Which site-rounds are lost is a function of (seed, rate,
round, site); a dropped site has done its work and its answer never arrives. Three seeds. Printed per rate: the
final loss on all held-out rows and its relative distance from the run without drops; `skips` counts attempts that
fell below the quorum and were run again, which is how the engine answers rounds that lost too much.

The limits (2 and 4 %) are those of a run whose learning rate has come down by its end. Training all weights at a
constant rate (`--set train.mode=full --set train.schedule=constant --set train.learning-rate=0.003`) is still falling
steeply when it ends, so the tokens that were lost show in full; both runs are in `dropout_loss.log`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

RATES, SEEDS = (0.0, 0.25, 0.5), (1, 2, 3)
SITES = ("clinic", "clinic-2", "kitchen", "workshop")
LIMITS = {0.25: 0.02, 0.5: 0.04}


def run_one(folder: Path, rate: float, seed: int, rounds: int, extra: list[str]) -> dict[str, Any]:
    """Return final loss, drops and skips of one run."""
    from flwr.app import Error, Message
    from support.fakegrid import FakeGrid, FakeSite, VirtualClock, app_site

    from server_app.run import Session
    from umbel.config import resolve
    from umbel.messages import CONTROL_RECORD, TRAIN, Instruction, from_record
    from umbel.seeds import generator
    from umbel.telemetry.events import read_events

    drops = 0

    def lossy(name: str, answer: Any) -> Any:
        def handle(kind: str, message: Message) -> Message:
            nonlocal drops
            reply = answer(kind, message)
            if kind != TRAIN:
                return reply
            order = from_record(Instruction, message.content[CONTROL_RECORD])
            if generator(seed, "drop", name, order.round, order.attempt).random() >= rate:
                return reply
            drops += 1
            return Message(Error(8, "dropped"), reply_to=message)

        return handle

    clock = VirtualClock()
    grid = FakeGrid(clock)
    for number, name in enumerate(SITES, start=1):
        node = {
            "name": name,
            "data": f"demo:{name.split('-')[0]}",
            "state-dir": str(folder / "state"),
            "resident": "off",
        }
        grid.sites[number] = FakeSite(lossy(name, app_site(number, node)))
    config = resolve(
        None,
        [
            f"run.rounds={rounds}",
            f"run.seed={seed}",
            "run.max-consecutive-skips=50",
            f"run.output-dir={folder / 'run'}",
            "clients.minimum=4",
            "clients.quorum=1",
            "clients.max-norm-ratio=0",
            "train.local-steps=4",
            "train.batch-size=8",
            "train.learning-rate=0.005",
            "train.threads=1",
            "data.max-length=128",
            "data.heldout-fraction=0.2",
            "eval.every=0",
            "telemetry.report=false",
            *extra,
        ],
    )
    began = time.monotonic()
    session = Session(config, grid, simulated=True, now=clock.now, sleep=clock.sleep)
    code = session.run()
    if code:
        raise RuntimeError(session.history.reason)
    events = read_events(folder / "run" / "events.jsonl")
    records = [e for e in events if e["event"] == "round_committed"]
    skips = sum(e["outcome"] != "commit" for e in records)
    accepted = sum(len(e["accepted"]) for e in records if e["outcome"] == "commit")
    losses = [e["loss"] for e in events if e["event"] == "evaluated"]
    first = next(e["heldout"]["loss"] for e in records if e.get("heldout"))
    return {
        "rate": rate,
        "seed": seed,
        "first_loss": first,
        "final_loss": losses[-1],
        "drops": drops,
        "accepted": accepted,
        "skips": skips,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Print every run and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], help="a setting, key=value")
    arguments = parser.parse_args()
    runs = []
    for seed in SEEDS:
        for rate in RATES:
            with tempfile.TemporaryDirectory(prefix="umbel-drop-") as scratch:
                runs.append(run_one(Path(scratch), rate, seed, arguments.rounds, arguments.set))
            print(json.dumps(runs[-1]), flush=True)
    base = {r["seed"]: r["final_loss"] for r in runs if r["rate"] == 0.0}
    distances = {
        str(rate): [round(r["final_loss"] / base[r["seed"]] - 1.0, 5) for r in runs if r["rate"] == rate]
        for rate in RATES[1:]
    }
    good = all(abs(d) <= LIMITS[float(rate)] for rate, values in distances.items() for d in values)
    means = {rate: round(statistics.fmean(values), 5) for rate, values in distances.items()}
    result = {
        "rounds": arguments.rounds,
        "relative_to_no_drops": distances,
        "mean": means,
        "within_limits": good,
    }
    print(json.dumps({**result, "runs": runs} if arguments.json else result))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
