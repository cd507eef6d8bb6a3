"""Peak memory of the server against the number of sites, with Flower's FedAvg beside it.

    python -m benchmarks.server_memory --json

One round over a state of 20 million float32 numbers (20 tensors, 80 MB) with 4, 16 and 64 sites, each in a process
of its own; the peak resident set of that process is reported. Replies are read from a file at the moment the server
pulls them, so that no memory of a site is counted. Umbel: the round engine with its checks, spool (256 MiB in
memory, the rest on disk) and merge. Flower: `FedAvg.aggregate_train` over the same replies, collected in a list as
`send_and_receive` returns them.

Flower's server must hold all replies at once, so `--num-parameters` may be lowered where memory is short; it then
changes both columns.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

NUM_TENSORS = 20
SITES = (4, 16, 64)


def make_state(num_parameters: int) -> dict[str, np.ndarray]:
    """Return tensors of equal size."""
    rng = np.random.default_rng(0)
    size = num_parameters // NUM_TENSORS
    return {f"layer{i:02d}": rng.normal(size=size).astype(np.float32) for i in range(NUM_TENSORS)}


def umbel_round(num_sites: int, num_parameters: int, scratch: Path) -> None:
    """Run one round of the engine over sites whose answers lie in a file."""
    from flwr.app import ArrayRecord, Message, RecordDict
    from support.fakegrid import FakeGrid, FakeSite, VirtualClock

    import compression
    from compression import Layout
    from compression.flower import frame_to_array
    from server_app.joining import Joining
    from server_app.mailbox import Mailbox
    from server_app.rounds import Engine
    from server_app.sites import Registry
    from strategies.fedavg import FedAvg
    from umbel.config import resolve
    from umbel.messages import CONTROL_RECORD, FRAME_RECORD, JOIN, Instruction, Reply, from_record, to_record

    config = resolve(
        None,
        [f"clients.minimum={num_sites}", "train.mode=full", "run.method=fedavg", "clients.over-provision=1"],
    )
    state = make_state(num_parameters)
    layout = Layout.from_arrays(state)
    stored = scratch / "update.frame"
    stored.write_bytes(compression.encode(state, layout, "exact"))

    class LazyGrid(FakeGrid):
        """Makes a reply when it is pulled, not when the message is sent."""

        def _push(self, message: Message) -> str:
            self._count += 1
            key = f"m{self._count}"
            message.metadata.__dict__["_message_id"] = key
            order = from_record(Instruction, message.content[CONTROL_RECORD])
            waiting[key] = (message.metadata.message_type, order, message.metadata.dst_node_id, message)
            message.content.pop(FRAME_RECORD, None)
            return key

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            return [reply(*waiting.pop(key)) for key in message_ids if key in waiting]

    waiting: dict[str, tuple] = {}

    def reply(kind: str, order: Any, node: int, message: Message) -> Message:
        known = Reply(order.run, order.round, order.attempt, order.base, f"s{node:03d}")
        records: dict[str, Any] = {}
        if kind == JOIN:
            facts = {"rows_train": 1, "rows_heldout": 0}
            records[CONTROL_RECORD] = to_record(
                Reply(order.run, 0, 0, "", f"s{node:03d}", metrics=json.dumps(facts))
            )
        else:
            fields = {**known.__dict__, "weight": 10.0, "tokens": 10, "steps": 1, "loss": 1.0}
            records[CONTROL_RECORD] = to_record(Reply(**fields))
            records[FRAME_RECORD] = ArrayRecord({"frame": frame_to_array(stored.read_bytes())})
        return Message(RecordDict(records), reply_to=message)

    clock = VirtualClock()
    grid = LazyGrid(clock, {n: FakeSite(lambda kind, message: None) for n in range(1, num_sites + 1)})
    mailbox = Mailbox(grid, threaded=False)

    def quiet(event: str, /, **fields: Any) -> None: ...

    joining = Joining(
        grid,
        mailbox,
        Registry(),
        run="r",
        config_json="{}",
        on_event=quiet,
        now=clock.now,
        sleep=clock.sleep,
        patient=False,
    )
    engine = Engine(
        config,
        FedAvg(config, layout),
        state,
        mailbox,
        joining,
        run="r",
        on_event=quiet,
        now=clock.now,
        sleep=clock.sleep,
    )
    joining.wait_for_start(num_sites, 300.0)
    record = engine.run_round()
    if len(record["accepted"]) != num_sites:
        raise RuntimeError(f"{len(record['accepted'])} of {num_sites} updates were accepted")


def flower_round(num_sites: int, num_parameters: int, scratch: Path) -> None:
    """Aggregate the same updates with Flower's FedAvg."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg
    from support.fakegrid import FakeGrid, VirtualClock

    # Sets the identity that Flower stamps messages with.
    FakeGrid(VirtualClock())
    state = make_state(num_parameters)
    for name, value in state.items():
        np.save(scratch / f"{name}.npy", value, allow_pickle=False)

    def reply(node: int) -> Message:
        arrays = {n: Array(np.load(scratch / f"{n}.npy", allow_pickle=False)) for n in state}
        content = RecordDict(
            {
                "arrays": ArrayRecord(arrays),
                "metrics": MetricRecord({"num-examples": 10, "train_loss": 1.0}),
            }
        )
        asked = Message(RecordDict({}), node, "train")
        asked.metadata.__dict__["_message_id"] = f"m{node}"
        return Message(content, reply_to=asked)

    strategy = FedAvg()
    replies = [reply(node) for node in range(1, num_sites + 1)]
    arrays, _ = strategy.aggregate_train(1, replies)
    if arrays is None:
        raise RuntimeError("Flower aggregated nothing")


def peak_of(kind: str, num_sites: int, num_parameters: int) -> int:
    """Return the peak resident set of one round in a process of its own, in bytes."""
    command = [sys.executable, "-m", "benchmarks.server_memory", "--one", kind, str(num_sites)]
    command += ["--num-parameters", str(num_parameters)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} with {num_sites} sites: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def main() -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--num-parameters", type=int, default=20_000_000)
    parser.add_argument("--sites", type=int, nargs="*", default=list(SITES))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, num_sites = arguments.one[0], int(arguments.one[1])
        with tempfile.TemporaryDirectory(prefix="umbel-memory-") as scratch:
            work = umbel_round if kind == "umbel" else flower_round
            work(num_sites, arguments.num_parameters, Path(scratch))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return 0
    result: dict[str, Any] = {"num_parameters": arguments.num_parameters}
    for kind in ("umbel", "flower"):
        result[f"{kind}_peak_bytes"] = {
            str(n): peak_of(kind, n, arguments.num_parameters) for n in arguments.sites
        }
    peaks = list(result["umbel_peak_bytes"].values())
    result["umbel_spread"] = round(max(peaks) / min(peaks) - 1.0, 4)
    if arguments.json:
        print(json.dumps(result))
    else:
        for kind in ("umbel", "flower"):
            print(kind, {n: f"{b / 2**20:.0f} MiB" for n, b in result[f"{kind}_peak_bytes"].items()})
    return 0 if result["umbel_spread"] < 0.10 else 1


if __name__ == "__main__":
    sys.exit(main())
