"""Outer rules against data-parallel training and torch, through the strategy the engine calls (table rows 1, 2)."""

from __future__ import annotations

import numpy as np
import pytest

from compression import Layout
from strategies import SiteUpdate, build
from umbel.config import resolve


def strategy_for(state, *overrides):
    config = resolve(None, ["train.mode=full", "run.method=fedavg", *overrides])
    return build(config, Layout.from_arrays(state), {})


def test_one_sgd_step_a_round_is_data_parallel_sgd():
    """H = 1, SGD inside, eta = 1, mu = 0: five rounds of four sites equal five steps on the joint batch."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    data = [[(rng.normal(size=(8, 6)), rng.normal(size=(8, 3))) for _ in range(5)] for _ in range(4)]

    def step(weights, batches, rate=0.1):
        w = torch.nn.Parameter(torch.tensor(weights))
        x, y = (
            torch.tensor(np.concatenate(part), dtype=torch.float32) for part in zip(*batches, strict=True)
        )
        ((x @ w - y) ** 2).mean().backward()
        with torch.no_grad():
            return (w - rate * w.grad).numpy()

    start = rng.normal(size=(6, 3)).astype(np.float32)
    strategy, state, joint = strategy_for({"w": start}), {"w": start}, start
    for r in range(5):
        updates = [SiteUpdate(f"s{i}", 8.0, {"w": step(state["w"], [data[i][r]])}) for i in range(4)]
        state = strategy.aggregate(state, updates).state
        joint = step(joint, [data[i][r] for i in range(4)])
        assert np.abs(state["w"] - joint).max() <= 1e-6 * np.abs(joint).max()


@pytest.mark.parametrize("size", [50, 40_000])
def test_nesterov_is_torch_sgd_in_float32(size):
    """The same rule in both implementations: numpy blocks below, the compiled loop above `fused.MIN_NUMEL`."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    start = rng.normal(size=size).astype(np.float32)
    settings = ("server.optimizer=nesterov", "server.learning-rate=0.7", "server.momentum=0.9")
    strategy, state = strategy_for({"w": start}, *settings), {"w": start}
    theirs = torch.nn.Parameter(torch.tensor(start.copy()))
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(6):
        delta = (1e-2 * rng.normal(size=size)).astype(np.float32)
        state = strategy.aggregate(state, [SiteUpdate("a", 1.0, {"w": state["w"] + delta})]).state
        theirs.grad = torch.tensor(-delta)
        optimizer.step()
        # One float32 rounding of the site's value is not in torch's gradient.
        assert np.abs(state["w"] - theirs.detach().numpy()).max() <= 1e-6 * np.abs(state["w"]).max()


def test_an_empty_round_changes_nothing():
    start = {"w": np.ones(4, np.float32)}
    settings = ("server.optimizer=nesterov", "server.learning-rate=0.7", "server.momentum=0.9")
    strategy = strategy_for(start, *settings)
    strategy.aggregate(start, [SiteUpdate("a", 1.0, {"w": np.zeros(4, np.float32)})])
    before = strategy.state_dict()
    # The engine never asks for it: below the quorum a round is skipped. The rule itself must agree.
    outcome = strategy.aggregate(start, [])
    assert outcome.state["w"].tobytes() == start["w"].tobytes()
    assert {k: v.tobytes() for k, v in strategy.state_dict().items()} == {
        k: v.tobytes() for k, v in before.items()
    }
