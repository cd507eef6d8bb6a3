"""One rank of a pretraining site: `torchrun -m client_app.rank FOLDER`, started by `client_app.several`.

Reads job and state from the folder, trains with the other ranks and, as rank 0, writes the result there. A refusal is
written too: it is the site's answer, not a crash.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from umbel.errors import Refusal


def main(folder: Path) -> int:
    """Train and return the exit code."""
    import torch

    job = json.loads((folder / "job.json").read_text())
    rank = int(os.environ["RANK"])
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if gpu else "gloo")
    try:
        result = _train(folder, job)
    except Refusal as error:
        if rank == 0 or not (folder / "refusal.json").exists():
            (folder / "refusal.json").write_text(
                json.dumps({"kind": str(error.kind), "reason": error.reason})
            )
        return 1
    finally:
        torch.distributed.destroy_process_group()
    if rank == 0:
        _write(folder, result)
    return 0


def _train(folder: Path, job: dict[str, Any]) -> Any:
    import torch

    from client_app.clock import Clock
    from client_app.prepare import set_threads
    from client_app.several import blocks_from_json, work_from_json
    from client_app.shards import shard
    from client_app.tasks.pretrain import pretrain
    from client_app.workbench import pick_device
    from umbel.config import from_json
    from umbel.models.described import described
    from umbel.models.source import load_model
    from umbel.models.state import write_state
    from umbel.tensorfile import load_tensors

    config = from_json(job["config"])
    set_threads(config.train.threads)
    device = pick_device(config.train.device)
    model = load_model(described(config)[0])
    write_state(model, load_tensors((folder / "state.safetensors").read_bytes()), "full")
    model = model.to(f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device)
    if config.train.sharding == "fsdp":
        shard(model)
    moments = load_tensors((folder / "moments.safetensors").read_bytes())
    # The margin was taken off where the seconds were counted.
    clock = Clock(job["seconds"] / 0.9 if job["seconds"] < 270 else job["seconds"] + 30.0)
    return pretrain(
        model,
        blocks_from_json(job["corpus"]),
        config,
        clock,
        work_from_json(job["work"]),
        moments=moments,
        precision=job["precision"],
        max_tokens=int(job["max_tokens"]),
    )


def _write(folder: Path, result: Any) -> None:
    from umbel.tensorfile import write_tensors

    write_tensors(folder / "trained.safetensors", result.arrays)
    write_tensors(folder / "kept.safetensors", result.moments)
    facts = {key: getattr(result, key) for key in ("tokens", "steps", "loss", "partial")}
    (folder / "result.json").write_text(json.dumps({**facts, "cursor": asdict(result.cursor)}))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
