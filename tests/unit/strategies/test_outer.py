"""Server optimisers against hand-computed steps and torch (H13, H14, H24, H25, H31, D13)."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.aggregation import outer
from strategies.aggregation.errors import UpdateError
from strategies.aggregation.outer import (
    SGD,
    Adaptive,
    fedavgm,
    fednova_factors,
    median_absolute_delta,
)
from umbel.errors import ConfigError


def walk(optimizer, deltas, start=1.0, dtype=np.float64):
    """Values of one scalar parameter after each delta (average - x)."""
    x, seen = {"x": np.array([start], dtype)}, []
    for delta in deltas:
        optimizer.step(x, {"x": x["x"] + delta})
        seen.append(x["x"].item())
    return seen


def test_diloco_outer_step_h25():
    """Pseudo-gradient 0.1 every round: 0.8670, 0.6773. The wrong sign would give 1.133."""
    seen = walk(SGD(0.7, 0.9, nesterov=True), [-0.1, -0.1])
    assert seen == pytest.approx([0.8670, 0.6773], abs=1e-7)


def test_lr_one_without_momentum_is_plain_averaging_bit_for_bit_h25():
    rng = np.random.default_rng(0)
    x = {"x": rng.normal(size=100).astype(np.float32)}
    average = {"x": (1e-4 * rng.normal(size=100)).astype(np.float32)}
    SGD().step(x, average)
    assert x["x"].tobytes() == average["x"].tobytes()


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.5, True)])
def test_equal_to_torch_sgd_over_ten_steps(momentum, nesterov):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    ours = {"x": rng.normal(size=(3, 2))}
    theirs = torch.nn.Parameter(torch.tensor(ours["x"].copy()))
    optimizer = torch.optim.SGD([theirs], lr=0.3, momentum=momentum, nesterov=nesterov)
    mine = SGD(0.3, momentum, nesterov, state_dtype=np.float64)
    for _ in range(10):
        gradient = rng.normal(size=(3, 2))
        mine.step(ours, {"x": ours["x"] - gradient})
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
        assert np.allclose(ours["x"], theirs.detach().numpy(), rtol=0, atol=1e-12)


def test_fedavgm_by_hand():
    """v = 1, then 0.5 * 1 + 1 = 1.5; lr 0.1."""
    assert walk(fedavgm(0.1, 0.5), [1.0, 1.0]) == pytest.approx([1.1, 1.25])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # m = 0.1, 0.19 throughout; v0 = tau^2 = 1e-6.
        ("adam", [0.99e-6 + 0.01, 0.99 * (0.99e-6 + 0.01) + 0.01]),
        ("yogi", [1e-6 + 0.01, 1e-6 + 0.02]),
        ("adagrad", [1e-6 + 1.0, 1e-6 + 2.0]),
    ],
)
def test_adaptive_rules_by_hand(rule, expected):
    moves, x = [], 1.0
    for m, v in zip([0.1, 0.19], expected):
        x += 0.1 * m / (v**0.5 + 1e-3)
        moves.append(x)
    optimizer = Adaptive(rule, 0.1, (0.9, 0.99), 1e-3, state_dtype=np.float64)
    assert walk(optimizer, [1.0, 1.0]) == pytest.approx(moves, abs=1e-12)


def test_yogi_lowers_v_when_deltas_shrink():
    optimizer = Adaptive("yogi", 0.1, (0.0, 0.9), 1e-3, state_dtype=np.float64)
    walk(optimizer, [1.0, 0.1])
    assert optimizer.state_dict()["v/x"].item() == pytest.approx(1e-6 + 0.1 - 0.1 * 0.01)


@pytest.mark.parametrize(
    "make",
    [lambda: SGD(0.7, 0.9, nesterov=True), lambda: Adaptive("adam"), lambda: Adaptive("yogi"),
     lambda: Adaptive("adagrad"), lambda: fedavgm()],
)  # fmt: skip
def test_buffers_and_counters_are_averaged_whatever_the_optimiser_h13_h14(make):
    names = ["bn.running_var", "bn.num_batches_tracked", "mask"]
    x = dict(zip(names, [np.array([0.01], np.float32), np.array(7), np.array([True])]))
    average = dict(zip(names, [np.array([0.005], np.float32), np.array(13), np.array([False])]))
    x["w"], average["w"] = np.ones(1, np.float32), np.full(1, 2.0, np.float32)
    optimizer = make()
    for _ in range(3):
        optimizer.step(x, average)
    assert x["bn.running_var"].item() == np.float32(0.005)
    assert (x["bn.num_batches_tracked"].item(), x["bn.num_batches_tracked"].shape) == (13, ())
    assert x["mask"].tolist() == [False]
    assert x["w"].item() != 1.0
    assert not any("bn" in key for key in optimizer.state_dict())


def test_resume_is_bit_exact_and_state_is_arrays():
    rng = np.random.default_rng(2)
    averages = [{"x": rng.normal(size=5).astype(np.float32)} for _ in range(6)]
    for make in (lambda: SGD(0.7, 0.9, nesterov=True), lambda: Adaptive("adam", tau="median")):
        straight, x = make(), {"x": np.zeros(5, np.float32)}
        for average in averages:
            straight.step(x, average)
        first, y = make(), {"x": np.zeros(5, np.float32)}
        for average in averages[:3]:
            first.step(y, average)
        saved = first.state_dict()
        assert all(isinstance(v, np.ndarray) for v in saved.values())
        second = make()
        second.load_state_dict(saved)
        for average in averages[3:]:
            second.step(y, average)
        assert x["x"].tobytes() == y["x"].tobytes()


def test_saved_and_loaded_state_is_not_shared_with_the_optimiser():
    """A checkpoint taken before a step must not change with it, nor the dict it was loaded from."""
    optimizer, x = SGD(0.5, 0.9), {"x": np.zeros(2)}
    optimizer.step(x, {"x": np.ones(2)})
    saved = optimizer.state_dict()
    before = saved["momentum/x"].copy()
    other = SGD(0.5, 0.9)
    other.load_state_dict(saved)
    for each in (optimizer, other):
        each.step(x, {"x": np.ones(2)})
    assert np.array_equal(saved["momentum/x"], before)
    assert not np.array_equal(optimizer.state_dict()["momentum/x"], before)


def test_state_of_another_rule_is_refused():
    other = Adaptive("adam")
    other.step({"x": np.zeros(2)}, {"x": np.ones(2)})
    with pytest.raises(ConfigError, match="another rule"):
        SGD(1.0, 0.9).load_state_dict(other.state_dict())
    optimizer = SGD(0.5, 0.9)
    optimizer.load_state_dict({"momentum/x": np.zeros(3, np.float32)})
    with pytest.raises(UpdateError, match="momentum/x"):
        optimizer.step({"x": np.zeros(2)}, {"x": np.ones(2)})


def test_a_frozen_factor_keeps_value_and_moments():
    """RoLoRA trains one factor at a time: the other one's moments are neither used nor decayed."""
    optimizer = SGD(0.5, 0.9)
    x = {"A": np.zeros(2, np.float32), "B": np.zeros(2, np.float32)}
    optimizer.step(x, {"A": np.ones(2, np.float32), "B": np.ones(2, np.float32)})
    kept, a = optimizer.state_dict()["momentum/A"], x["A"].copy()
    optimizer.step(x, {"B": np.ones(2, np.float32)})
    assert np.array_equal(optimizer.state_dict()["momentum/A"], kept)
    assert np.array_equal(x["A"], a)
    assert x["B"].item(0) > 0.5


def test_blocks_and_dtypes(monkeypatch):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(3)
    start, average = rng.normal(size=(5, 7)), {"x": rng.normal(size=(5, 7))}
    whole, parts = {"x": start.copy()}, {"x": start.copy()}
    SGD(0.7, 0.9, nesterov=True).step(whole, average)
    monkeypatch.setattr(outer, "BLOCK", 4)
    SGD(0.7, 0.9, nesterov=True).step(parts, average)
    assert whole["x"].tobytes() == parts["x"].tobytes()
    half = {"x": start.astype(ml_dtypes.bfloat16)}
    SGD(0.7, 0.9).step(half, average)
    assert half["x"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("average", "name"),
    [({"a": np.ones(2), "x": np.array([1.0, np.nan])}, "x"), ({"a": np.ones(2), "x": np.ones(3)}, "x"),
     ({"a": np.ones(2), "z": np.ones(2)}, "z")],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", [SGD(), SGD(0.5, 0.9), Adaptive("adam")])
def test_a_bad_average_changes_nothing_h24(optimizer, average, name):
    x = {"a": np.zeros(2), "x": np.zeros(2)}
    with pytest.raises(UpdateError, match=name):
        optimizer.step(x, average)
    assert not x["a"].any()
    assert not optimizer.state_dict()


def test_a_view_that_cannot_be_written_in_place_is_a_value_error():
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    for bad in (np.zeros((2, 2)).T, frozen):
        with pytest.raises(ValueError, match="writeable"):
            SGD(0.5).step({"x": bad}, {"x": np.ones(bad.shape)})


def test_median_tau_keeps_adapter_deltas_in_proportion():
    """A moves by 1e-5, B by 1e-3: tau 1e-3 shrinks A's step a hundredfold against B's, the median does not."""
    names = ("q.lora_A.weight", "q.lora_B.weight")
    average = {names[0]: np.full(4, 1e-5), names[1]: np.full(4, 1e-3)}

    def moves(tau):
        x = {n: np.zeros(4) for n in names}
        optimizer = Adaptive("adam", 1e-3, tau=tau)
        optimizer.step(x, average)
        return [x[n][0] for n in names], optimizer.state_dict()

    (a, b), state = moves("median")
    assert a == pytest.approx(b, rel=1e-6)
    assert (state["tau/A"].item(), state["tau/B"].item()) == pytest.approx((1e-5, 1e-3))
    (a, b), _ = moves(1e-3)
    assert b / a > 90


def test_median_tau_waits_for_the_first_delta_and_never_divides_by_zero():
    optimizer, x = Adaptive("adam", tau="median"), {"x": np.ones(2)}
    optimizer.step(x, {"x": np.ones(2)})
    assert x["x"].tolist() == [1.0, 1.0]
    optimizer.step(x, {"x": np.array([1.0, 1.5])})
    assert np.isfinite(x["x"]).all()
    assert optimizer.state_dict()["tau/rest"].item() == 0.5
    assert median_absolute_delta({}, {}, []) == 0.0


def test_fednova_by_hand():
    """p = (1/4, 3/4), steps (2, 10): t_eff = 8, factors 4 and 0.8."""
    assert fednova_factors([1, 3], [2, 10]).tolist() == [4.0, 0.8]
    assert fednova_factors([1, 3, 9], [5, 5, 5]).tolist() == pytest.approx([1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match="num_steps"):
        fednova_factors([1, 1], [0, 3])
    with pytest.raises(ConfigError, match="weights"):
        fednova_factors([0, 0], [1, 3])


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(0.0),
        lambda: SGD(1.0, 1.0),
        lambda: SGD(1.0, 0.0, nesterov=True),
        lambda: Adaptive("adam", tau=0.0),
        lambda: Adaptive("adam", tau="mean"),
        lambda: Adaptive("adam", betas=(0.9, 1.0)),
        lambda: Adaptive("rms"),
    ],
)
def test_settings_out_of_range_are_config_errors(make):
    with pytest.raises(ConfigError, match="outer"):
        make()
