"""The compiled outer steps have the bits of the numpy blocks."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.aggregation import fused
from strategies.aggregation.outer import SGD, Adaptive

RULES = {
    "nesterov": lambda: SGD(0.7, 0.9, True),
    "heavy ball": lambda: SGD(0.7, 0.9),
    "plain": lambda: SGD(0.3),
    "adam": lambda: Adaptive("adam", 0.01),
    "yogi": lambda: Adaptive("yogi", 0.01, tau="median"),
    "adagrad": lambda: Adaptive("adagrad", 0.01),
}


@pytest.mark.parametrize("rule", RULES)
def test_three_steps_bit_for_bit(rule, monkeypatch):
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    size = fused.MIN_NUMEL + 77
    start = rng.normal(size=size).astype(np.float32)
    averages = [start + (1e-3 * rng.normal(size=size)).astype(np.float32) for _ in range(3)]
    found = []
    for limit in (1 << 15, 1 << 62):
        monkeypatch.setattr(fused, "MIN_NUMEL", limit)
        optimizer, x = RULES[rule](), {"w": start.copy()}
        for average in averages:
            optimizer.step(x, {"w": average})
        found.append([x["w"].tobytes(), *(v.tobytes() for _, v in sorted(optimizer.state_dict().items()))])
    assert found[0] == found[1]


def test_only_long_contiguous_float32_is_taken():
    long = np.zeros(fused.MIN_NUMEL, np.float32)
    assert fused.usable(long, long)
    assert not fused.usable(long[:-1])
    assert not fused.usable(long, long.astype(np.float64))
    assert not fused.usable(np.zeros(2 * fused.MIN_NUMEL, np.float32)[::2])
