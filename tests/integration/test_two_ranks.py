"""R6: two processes over gloo train as one process does over twice the micro-batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from umbel.tensorfile import load_tensors

SCRIPT = '''
import json, os, sys
import numpy as np, torch
torch.set_num_threads(1)
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    torch.distributed.init_process_group("gloo")
from client_app.clock import Clock
from client_app.tasks.sft import train
from client_app.workbench import load_site_model
from umbel.config import resolve
from umbel.data.cursor import Cursor
from umbel.data.encode import Encoded
from umbel.tensorfile import dump_tensors


class Uneven(Clock):
    """Rank 1 sees its deadline after three steps, rank 0 never does."""
    def __init__(self):
        super().__init__(1e9)
        self.looks = 0

    @property
    def expired(self):
        self.looks += 1
        return self.looks > 3 and (world == 1 or torch.distributed.get_rank() == 1)


def row(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(4, 250, size=int(rng.integers(40, 200))).astype(np.int32)
    labels = np.full(len(ids), -100, np.int32)
    labels[len(ids) // 2:] = ids[len(ids) // 2:]
    return Encoded(ids, labels)


config = resolve(None, ["train.threads=1", "train.batch-size=2", "train.accumulation=2", "train.learning-rate=0.001"])
loaded = load_site_model(config)
result = train(
    loaded.model, [row(i) for i in range(24)], config, Uneven(), site="s", round_index=1, first_step=0,
    total_steps=9, cursor=Cursor(0, 0), moments={}, precision="float32", max_tokens=256, packing=True, local_steps=5,
)
facts = {"tokens": result.tokens, "steps": result.steps, "loss": result.loss, "partial": result.partial}
name = os.environ.get("RANK", "one")
open(f"{sys.argv[1]}/{name}.json", "w").write(json.dumps(facts))
open(f"{sys.argv[1]}/{name}.safetensors", "wb").write(dump_tensors(result.arrays))
'''


@pytest.mark.timeout(300)
def test_r6_two_ranks_equal_one_with_twice_the_accumulation(tmp_path) -> None:
    """Largest difference of a trained weight 1e-6; both ranks hold the same bits and stop at the same step."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for command in (torchrun, [sys.executable]):
        done = subprocess.run(
            [*command, str(script), str(tmp_path)],
            env=env,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    facts = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("0", "1", "one")}
    arrays = {name: load_tensors((tmp_path / f"{name}.safetensors").read_bytes()) for name in facts}
    assert facts["0"] == facts["1"]
    assert (facts["0"]["steps"], facts["0"]["partial"]) == (3, True)
    assert facts["0"]["tokens"] == facts["one"]["tokens"]
    assert abs(facts["0"]["loss"] - facts["one"]["loss"]) < 1e-6
    for name, array in arrays["one"].items():
        np.testing.assert_array_equal(arrays["0"][name], arrays["1"][name])
        np.testing.assert_allclose(arrays["0"][name], array, atol=1e-6, rtol=0)
