"""Local work of the methods: one factor at a time, cores, the first gradient, and FedProx, on tiny models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from client_app.clock import Clock
from client_app.state import Snapshot
from client_app.tasks.work import local_work
from client_app.workbench import load_site_model
from umbel.config import resolve
from umbel.data.cursor import Cursor
from umbel.data.encode import Encoded
from umbel.errors import Refusal
from umbel.exchange import A, B
from umbel.models.reshape import set_cores
from umbel.models.state import read_state, write_state

SETTINGS = (
    "lora.rank=4",
    "lora.alpha=8",
    "train.batch-size=2",
    "train.learning-rate=0.01",
    "train.threads=1",
)


def row(length: int, supervised: int, seed: int) -> Encoded:
    ids = np.random.default_rng(seed).integers(4, 250, size=length).astype(np.int32)
    labels = np.full(length, -100, np.int32)
    labels[-supervised:] = ids[-supervised:]
    return Encoded(ids, labels)


ROWS = [row(10 + i, 3 + i % 4, 20 + i) for i in range(6)]


@pytest.fixture(scope="module", params=["builtin:tiny-llama", "builtin:tiny-gpt2"])
def loaded(request):
    return load_site_model(resolve(None, [*SETTINGS, f"model.name={request.param}"]))


@pytest.fixture(scope="module")
def start(loaded):
    rng = np.random.default_rng(0)
    arrays = read_state(loaded.model, "lora")
    return {n: (a + 0.02 * rng.normal(size=a.shape)).astype(np.float32) for n, a in arrays.items()}


def work(loaded, start, trains: str, *overrides: str, snapshot=None, steps: int = 2, rows=ROWS):
    if start is not None:
        write_state(loaded.model, start, "lora")
    return local_work(
        trains,
        loaded.model,
        rows,
        resolve(None, [*SETTINGS, *overrides]),
        Clock(1e9),
        site="a",
        round_index=1,
        first_step=0,
        total_steps=10,
        cursor=Cursor(0, 0),
        remembered=snapshot or Snapshot({}, {}),
        precision="float32",
        max_tokens=512,
        packing=True,
        local_steps=steps,
    )


@pytest.mark.parametrize(("trains", "still"), [("B", A), ("A", B)])
def test_d04_the_frozen_factor_keeps_its_bits_and_its_moments(loaded, start, trains: str, still: str) -> None:
    """D04; RoLoRA's frozen moments are neither used nor decayed, own tensors of the site are no moments."""
    keep = "train.optimizer-state=keep"
    both = work(loaded, start, "AB", keep).moments
    kept = Snapshot({}, {**both, "own/x": np.ones(1, np.float32)})
    result = work(loaded, start, trains, keep, snapshot=kept)
    for name, array in result.arrays.items():
        assert np.array_equal(array, start[name]) == name.endswith(still), name
    assert set(result.moments) == set(both)
    for key, value in both.items():
        assert np.array_equal(result.moments[key], value) == (f"{still}/" in key), key


def test_cores_train_alone(loaded, start) -> None:
    """B and A keep their bits, every core moves from zero."""
    write_state(loaded.model, start, "lora")
    set_cores(loaded.model, 2)
    try:
        result = work(loaded, None, "core")
        for name, array in result.arrays.items():
            if name.endswith(".core"):
                assert np.abs(array).max() > 0
            elif not name.endswith(".gain"):
                assert np.array_equal(array, start[name])
    finally:
        set_cores(loaded.model, 0)


def test_the_first_gradient_is_the_best_low_rank_part_of_the_dense_one(loaded, start) -> None:
    """s B A = truncated SVD of dL/dW at B = 0, in the layer's own orientation (Linear and Conv1D); nothing moves."""
    zero = {n: np.zeros_like(a) if n.endswith(B) else a for n, a in start.items()}
    result = work(loaded, zero, "gradient")
    assert result.steps == 1
    after = read_state(loaded.model, "lora")
    assert all(np.array_equal(after[n], zero[n]) for n in zero)
    module = loaded.modules[0]
    layer = loaded.model.get_submodule(f"base_model.model.{module.name}")
    weight = layer.get_base_layer().weight
    assert weight.grad is None
    assert not weight.requires_grad
    # Along the leading direction of G the loss changes by |G's largest singular value| a unit step.
    a, b = (
        result.arrays[module.name + A].astype(np.float64),
        result.arrays[module.name + B].astype(np.float64),
    )
    low = module.scale * b @ a
    u, s, vt = np.linalg.svd(low)
    step = torch.tensor(np.outer(u[:, 0], vt[0]), dtype=torch.float32)
    step = step.T if module.fan_in_fan_out else step
    losses = []
    for size in (1e-2, -1e-2):
        with torch.no_grad():
            weight.add_(size * step)
        losses.append(work(loaded, zero, "gradient").loss)
        with torch.no_grad():
            weight.sub_(size * step)
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(s[0], rel=2e-2)


def test_fedprox_is_a_pull_after_the_step(loaded, start) -> None:
    """One step: theta - eta mu (theta - theta_0), so (1 - eta mu) of the plain move; mu = 0 changes no bit."""
    steps = {"steps": 1}
    constant = "train.schedule=constant"
    plain = work(loaded, start, "AB", constant, **steps).arrays
    none = work(loaded, start, "AB", constant, "train.proximal-mu=0", **steps).arrays
    pulled = work(loaded, start, "AB", constant, "train.proximal-mu=40", **steps).arrays
    for name, array in plain.items():
        assert np.array_equal(none[name], array)
        move, less = array - start[name], pulled[name] - start[name]
        assert np.allclose(less, (1 - 0.01 * 40) * move, atol=1e-7)


def test_a_second_stage_without_a_first_is_refused(loaded, start) -> None:
    with pytest.raises(Refusal, match="first stage"):
        work(loaded, start, "")
    kept = Snapshot({"spent": {"tokens": 7, "steps": 2, "loss": 1.5, "partial": False}}, {})
    result = work(loaded, start, "", snapshot=kept)
    assert (result.tokens, result.steps, result.loss) == (7, 2, 1.5)
    assert all(np.array_equal(a, start[n]) for n, a in result.arrays.items())
