"""Fragments: who is in which, when each travels, and what each remembers (H25)."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.aggregation.outer import SGD
from strategies.outer.streaming import Fragmented, Schedule, fragments, mix
from umbel.errors import ConfigError

SIZES = {f"h.{i}.{part}": 100 for i in range(6) for part in ("attn", "mlp")} | {
    "wte": 300,
    "wpe": 100,
    "ln_f": 4,
}


def test_layers_are_strided_and_the_rest_balances_bytes():
    parts = fragments(SIZES, 3)
    assert parts[0][:4] == ["h.0.attn", "h.0.mlp", "h.3.attn", "h.3.mlp"]
    assert sorted(n for p in parts for n in p) == sorted(SIZES)
    # 400 bytes of layers each; then 300 to the first, 100 to the second, 4 to the third.
    assert [sum(SIZES[n] for n in p) for p in parts] == [700, 500, 404]
    with pytest.raises(ConfigError, match="fragments"):
        fragments({"w": 4}, 2)


def test_every_fragment_travels_once_a_period_and_arrives_later():
    schedule = Schedule(period=12, count=3, overlap=2)
    sent = {s: f for s in range(25) if (f := schedule.sent_after(s)) is not None}
    assert sent == {4: 0, 8: 1, 12: 2, 16: 0, 20: 1, 24: 2}
    mixed = {s: f for s in range(25) if (f := schedule.mixed_after(s)) is not None}
    assert mixed == {6: 0, 10: 1, 14: 2, 18: 0, 22: 1}


@pytest.mark.parametrize(("period", "count", "overlap"), [(10, 3, 0), (12, 3, 4), (12, 3, -1)])
def test_a_period_that_does_not_divide_or_an_overlap_too_long_is_refused(period, count, overlap):
    with pytest.raises(ConfigError):
        Schedule(period, count, overlap)


def test_mixing_by_hand():
    assert mix(np.float32([1, 2]), np.float32([3, 6]), 0.5).tolist() == [2.0, 4.0]
    assert mix(np.float32([1, 2]), np.float32([3, 6]), 1.0).tolist() == [1.0, 2.0]


def test_each_fragment_has_its_own_momentum_and_survives_its_state_dict():
    """Fragment 0 moves twice, fragment 1 once: each equals its own Nesterov, also after a restart."""
    state = {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}
    server = Fragmented(state, [["a"], ["b"]], 0.7, 0.9)
    alone, values = SGD(0.7, 0.9, True), {"a": np.zeros(3, np.float32)}
    for target in (0.1, 0.3):
        server.merge(0, {"a": np.full(3, target, np.float32)})
        alone.step(values, {"a": np.full(3, target, np.float32)})
    server.merge(1, {"b": np.full(2, 1.0, np.float32)})
    assert server.state["a"].tobytes() == values["a"].tobytes()
    assert server.state["b"].tolist() == pytest.approx([1.33, 1.33])
    assert server.versions == [2, 1]
    other = Fragmented(state, [["a"], ["b"]], 0.7, 0.9)
    other.load_state_dict(server.state_dict())
    for one in (server, other):
        one.merge(0, {"a": np.full(3, 0.5, np.float32)})
    assert other.state["a"].tobytes() == server.state["a"].tobytes()
    assert other.versions == [3, 1]


def test_a_fragment_takes_its_own_tensors_only():
    server = Fragmented(
        {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}, [["a"], ["b"]], 1.0, 0.0
    )
    with pytest.raises(ConfigError, match="fragment 0"):
        server.merge(0, {"b": np.zeros(2, np.float32)})
