"""A pretraining round in this process, or in several that torchrun starts: the same call, the same result.

    train.processes = P     P ranks share the micro-batches of every step (`client_app.ranks`)
    sharding "ddp"          each holds all weights and sums gradients: equal to one process but for the order of sums
    sharding "fsdp"         weights, gradients and moments lie in shards (torch FSDP2), gathered layer by layer

The state goes to the ranks and back through files of safetensors in a folder of the site; nothing is unpickled. On a
machine with GPUs a rank takes the device of its number and the group is NCCL, otherwise gloo.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from client_app.clock import Clock
from client_app.tasks.pretrain import Work, pretrain
from client_app.tasks.sft import TrainResult
from umbel.config import to_json
from umbel.config.schema import Config
from umbel.data.cursor import Cursor
from umbel.errors import Refusal, RefusalKind
from umbel.models.state import read_state
from umbel.tensorfile import load_tensors, write_tensors

POLL_SECONDS = 0.1
END_SECONDS = 30.0


def pretrain_anywhere(
    model: Any,
    blocks: Any,
    config: Config,
    clock: Clock,
    work: Work,
    *,
    moments: dict[str, np.ndarray],
    precision: str,
    max_tokens: int,
) -> TrainResult:
    """Do the round's inner steps; raises what `client_app.tasks.pretrain` raises, wherever it happened."""
    if config.train.processes == 1:
        return pretrain(
            model, blocks, config, clock, work, moments=moments, precision=precision, max_tokens=max_tokens
        )
    folder = Path(tempfile.mkdtemp(prefix="umbel-ranks-"))
    try:
        write_tensors(folder / "state.safetensors", read_state(model, "full"))
        write_tensors(folder / "moments.safetensors", moments)
        job = {
            "config": to_json(config),
            "corpus": blocks_to_json(blocks),
            "work": asdict(work),
            "seconds": clock.left_seconds,
            "precision": precision,
            "max_tokens": max_tokens,
        }
        (folder / "job.json").write_text(json.dumps(job))
        _run(folder, config.train.processes, clock)
        return _result(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def blocks_to_json(blocks: Any) -> dict[str, Any]:
    """Return the training blocks as plain data; the chosen ones are the complement of few held-out blocks."""
    corpus, held = blocks.corpus, np.setdiff1d(np.arange(blocks.chosen.max() + 1), blocks.chosen)
    return {
        "folder": str(corpus.folder),
        "dtype": corpus.dtype,
        "num_tokens": corpus.num_tokens,
        "digest": corpus.digest,
        "shards": corpus.shards,
        "length": blocks.length,
        "heldout": held.tolist(),
        "last": int(blocks.chosen.max()),
    }


def blocks_from_json(found: dict[str, Any]) -> Any:
    """Return what `blocks_to_json` described."""
    from umbel.data.tokens import Blocks, Corpus

    shards = tuple((name, int(size)) for name, size in found["shards"])
    corpus = Corpus(Path(found["folder"]), found["dtype"], int(found["num_tokens"]), found["digest"], shards)
    chosen = np.setdiff1d(np.arange(found["last"] + 1), np.array(found["heldout"], np.int64))
    return Blocks(corpus, int(found["length"]), chosen)


def _run(folder: Path, processes: int, clock: Clock) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    root = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with open(folder / "log", "wb") as log:
        started = subprocess.Popen(
            [*command, "-m", "client_app.rank", str(folder)],
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while started.poll() is None:
                # Looking at it also tells whether anybody still waits for the answer.
                if clock.expired and clock.left_seconds < -END_SECONDS:
                    raise Refusal(RefusalKind.DEADLINE, "the processes of this site did not stop in time")
                time.sleep(POLL_SECONDS)
        finally:
            if started.poll() is None:
                _end(started)
    if started.returncode and not (folder / "refusal.json").exists():
        lines = (folder / "log").read_text("utf-8", "replace").strip().splitlines()
        raise Refusal(
            RefusalKind.EXCEPTION,
            f"one of the {processes} processes of this site ended with {started.returncode}: "
            f"{next((x for x in reversed(lines) if 'Error: ' in x and 'ChildFailedError' not in x), '')}",
        )


def _end(started: subprocess.Popen) -> None:
    """End torchrun, which ends its ranks: they have sessions of their own, where no signal to its group arrives."""
    started.terminate()
    try:
        started.wait(END_SECONDS / 2)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def _result(folder: Path) -> TrainResult:
    refusal = folder / "refusal.json"
    if refusal.exists():
        said = json.loads(refusal.read_text())
        raise Refusal(RefusalKind(said["kind"]), said["reason"])
    facts = json.loads((folder / "result.json").read_text())
    arrays, moments = (
        load_tensors((folder / f"{name}.safetensors").read_bytes()) for name in ("trained", "kept")
    )
    return TrainResult(arrays, moments, Cursor(**facts.pop("cursor")), **facts)


def work_from_json(found: dict[str, Any]) -> Work:
    """Return the Work that `dataclasses.asdict` made plain."""
    lease = found["lease"]
    work = Work(**{**found, "cursor": Cursor(**found["cursor"]), "lease": None})
    return (
        work if lease is None else replace(work, lease=tuple((int(e), int(a), int(b)) for e, a, b in lease))
    )
