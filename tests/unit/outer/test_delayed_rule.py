"""Asynchronous arrivals: delayed Nesterov by hand, its twin without delay, its memory, and DyLU."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.outer.delayed import DelayedNesterov, dylu_steps
from strategies.outer.weights import stale_factor, weight_of
from umbel.errors import ConfigError


def test_two_turns_by_hand():
    """lr .5, mu .9, N 2, deltas 1 and 1, then 2 and 0; g = -delta, no momentum until the second arrival."""
    rule, x = DelayedNesterov(0.5, 0.9, 2), {"x": np.zeros(1, np.float32)}
    seen = []
    for delta in (1.0, 1.0, 2.0, 0.0):
        x = rule.arrive(x, {"x": np.full(1, delta, np.float32)})
        seen.append(float(x["x"][0]))
    # .25; .5 + .45 * 1; .95 + .5; then m = .9 * -1 - 1 = -1.9 and a step of .45 * 1.9.
    assert seen == pytest.approx([0.25, 0.95, 1.45, 1.45 + 0.45 * 1.9], abs=1e-6)


def test_delay_one_is_nesterov():
    from strategies.aggregation.outer import SGD

    rng = np.random.default_rng(0)
    rule, x = DelayedNesterov(0.7, 0.9, 1), {"x": np.zeros(5, np.float32)}
    twin, y = SGD(0.7, 0.9, True), {"x": np.zeros(5, np.float32)}
    for _ in range(5):
        delta = rng.normal(size=5).astype(np.float32)
        x = rule.arrive(x, {"x": delta})
        twin.step(y, {"x": y["x"] + delta})
        assert np.allclose(x["x"], y["x"], rtol=0, atol=1e-5)


def test_a_restart_between_two_arrivals_changes_nothing():
    rng = np.random.default_rng(2)
    deltas = [{"x": rng.normal(size=7).astype(np.float32)} for _ in range(7)]
    one, x = DelayedNesterov(0.5, 0.8, 3), {"x": np.zeros(7, np.float32)}
    other, y = DelayedNesterov(0.5, 0.8, 3), {"x": np.zeros(7, np.float32)}
    for delta in deltas:
        x = one.arrive(x, delta)
        y = other.arrive(y, delta)
        fresh = DelayedNesterov(0.5, 0.8, 3)
        fresh.load_state_dict(other.state_dict())
        other = fresh
        assert x["x"].tobytes() == y["x"].tobytes()


def test_foreign_state_and_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="another rule"):
        DelayedNesterov(1.0, 0.5, 2).load_state_dict({"m/x": np.zeros(1)})
    for bad in ((0.0, 0.5, 2), (1.0, 1.0, 2), (1.0, 0.5, 0)):
        with pytest.raises(ConfigError):
            DelayedNesterov(*bad)


def test_counters_and_flags_are_no_parameters_h14():
    rule = DelayedNesterov(1.0, 0.9, 1)
    state = {"n": np.array(10, np.int64), "flag": np.array([True])}
    moved = rule.arrive(state, {"n": np.array(13, np.int64), "flag": np.array([False])})
    assert moved["n"] == 13 and moved["n"].dtype == np.int64
    assert moved["flag"].tolist() == [True]


def test_dylu_gives_slow_sites_fewer_steps():
    assert dylu_steps(20, {"a": 2.0, "b": 1.0, "c": 0.01, "d": 0.0}) == {"a": 20, "b": 10, "c": 1, "d": 20}
    assert dylu_steps(20, {"a": 0.0}) == {"a": 20}


def test_weights():
    assert weight_of("tokens", 600.0, 3) == 600.0
    assert weight_of("uniform", 600.0, 3) == 1.0
    assert weight_of("token-rate", 600.0, 3) == 120_000.0
    assert stale_factor(0, 0.25, 2) == 1.0
    assert stale_factor(2, 0.25, 2) == pytest.approx(1 / 1.5)
    assert stale_factor(3, 0.25, 2) == 0.0
