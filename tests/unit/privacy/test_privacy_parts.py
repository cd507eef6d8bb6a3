"""Clip, noise, ledger and the private mean by themselves: exact numbers, and statistics with a bound on chance."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression import Layout
from strategies import Seat, SiteUpdate, build
from strategies.private_mean import PrivateMean
from umbel.config import resolve
from umbel.errors import ConfigError
from umbel.privacy import noise
from umbel.privacy.clip import change_norm, clip_factor, clipped
from umbel.privacy.ledger import BudgetExhausted, Ledger, new_release
from umbel.privacy.noise import seeded_normal, system_normal
from umbel.privacy.rdp import epsilon_after

PRIVATE = [
    "privacy.clip-norm=2",
    "privacy.noise-multiplier=1.5",
    "clients.normalise=fixed",
    "clients.weighting=uniform",
    "clients.max-norm-ratio=0",
]


def test_clipping_runs_over_all_tensors_together() -> None:
    start = {"a": np.zeros(2, np.float32), "b": np.ones((1, 2), np.float32), "n": np.array([3])}
    values = {"a": np.array([3, 0], np.float32), "b": np.array([[1, 5]], np.float32), "n": np.array([7])}
    assert change_norm(values, start) == 5.0
    found = clipped(values, start, 2.5)
    assert found["a"].tolist() == [1.5, 0.0]
    assert found["b"].tolist() == [[1.0, 3.0]]
    assert found["a"].dtype == np.float32
    # Counters are not part of the norm and are left to the server.
    assert found["n"].tolist() == [7]
    within = clipped(values, start, 5.0)
    assert all(within[name] is values[name] for name in values)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_f41_what_is_not_finite_is_left_for_the_encoder_to_name(bad) -> None:
    start, values = {"a": np.zeros(2, np.float32)}, {"a": np.array([1, bad], np.float32)}
    assert clipped(values, start, 0.1)["a"] is values["a"]
    assert clip_factor(change_norm(values, start), 0.1) == 0.0


def test_f41_a_zero_update_divides_nothing_by_zero() -> None:
    start = {"a": np.ones(3, np.float32)}
    assert clip_factor(change_norm(start, start), 1.0) == 1.0
    assert clipped(start, start, 1.0)["a"] is start["a"]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_the_bound_holds_after_clipping(values, bound) -> None:
    start = {"a": np.zeros(len(values), np.float32)}
    found = clipped({"a": np.array(values, np.float32)}, start, bound)
    assert change_norm(found, start) <= bound * (1 + 1e-6)


def test_noise_of_the_system_is_standard_normal_and_never_the_same() -> None:
    """10^6 numbers: mean, deviation and tails within six deviations of chance, over several blocks and odd sizes."""
    n = 3 * noise._BLOCK - 1
    x = system_normal(n)
    assert x.shape == (n,) and x.dtype == np.float64 and np.isfinite(x).all()
    assert abs(x.mean()) < 6 / math.sqrt(n)
    assert abs(x.std() - 1) < 6 / math.sqrt(2 * n)
    for at in (1.0, 2.0, 3.0):
        share, want = float((np.abs(x) > at).mean()), math.erfc(at / math.sqrt(2))
        assert abs(share - want) < 6 * math.sqrt(want / n)
    # The two halves of a block come from one radius and must still be unrelated.
    half = noise._BLOCK
    assert abs(float(np.mean(x[:half] * x[half : 2 * half]))) < 6 / math.sqrt(half)
    assert not np.array_equal(system_normal(8), system_normal(8))
    assert system_normal(0).size == 0


def test_seeded_noise_repeats_for_one_attempt_and_differs_between_attempts() -> None:
    first, again, other = (seeded_normal(7, r, a)(5) for r, a in ((1, 1), (1, 1), (1, 2)))
    assert first.tolist() == again.tolist() != other.tolist()


def test_the_ledger_counts_rows_by_identity() -> None:
    ledger = Ledger(1e-5)
    first, second = new_release(1, 1, 2.0), new_release(1, 1, 2.0)
    ledger.add(first)
    ledger.recall([first.to_dict(), second.to_dict(), {**first.to_dict(), "t": 0.0, "event": "x"}])
    assert ledger.releases == [first, second]
    assert ledger.epsilon == epsilon_after([(1.0, 2.0)] * 2, 1e-5)


def test_f42_the_ledger_refuses_the_release_beyond_the_budget_and_keeps_no_trace_of_it() -> None:
    three = epsilon_after([(1.0, 2.0)] * 3, 1e-5)
    ledger = Ledger(1e-5, budget=three)
    for r in (1, 2, 3):
        release = new_release(r, 1, 2.0)
        ledger.check(release)
        ledger.add(release)
    assert ledger.epsilon == three
    with pytest.raises(
        BudgetExhausted, match=r"round 4: the privacy budget is spent: 3 releases.*at delta"
    ) as e:
        ledger.check(new_release(4, 1, 2.0))
    assert e.value.exit_code == 77
    assert len(ledger.releases) == 3


def private_mean(state, updates, *overrides, n=4.0, normal=None, method="fedavg"):
    config = resolve(None, [*PRIVATE, f"run.method={method}", "train.mode=full", *overrides])
    strategy = build(config, Layout.from_arrays(state), {})
    source = normal or (lambda num: np.zeros(num))
    given = [SiteUpdate(f"s{i}", 1.0, arrays) for i, arrays in enumerate(updates)]
    return PrivateMean(strategy).aggregate(state, given, num_asked=n, before_release=lambda: source)


def test_f40_the_denominator_is_fixed_whatever_comes_back() -> None:
    state = {"w": np.array([1.0, 1.0], np.float32)}
    update = {"w": np.array([2.0, 1.0], np.float32)}
    for num in (1, 2, 3, 4, 5):
        moved = private_mean(state, [update] * num).state["w"]
        assert moved.tolist() == [1.0 + num / 4, 1.0]


def test_f40_one_site_moves_the_sum_by_at_most_the_bound() -> None:
    """An update a thousand times too long, not clipped at its site, counts with norm C = 2."""
    state = {"w": np.zeros(2, np.float32)}
    honest = [{"w": np.array([0.0, 1.0], np.float32)}] * 3
    with_liar = private_mean(state, [*honest, {"w": np.array([3000.0, -4000.0], np.float32)}])
    without = private_mean(state, honest)
    assert np.linalg.norm(with_liar.state["w"] - without.state["w"]) == pytest.approx(2.0 / 4, rel=1e-6)
    assert with_liar.metrics["privacy"]["clipped_by_server"] == 1
    assert without.metrics["privacy"]["clipped_by_server"] == 0


def test_f40_the_noise_has_deviation_z_c_over_n() -> None:
    state = {"w": np.zeros(400_000, np.float32)}
    found = private_mean(state, [state], normal=system_normal)
    want = 1.5 * 2.0 / 4
    assert found.metrics["privacy"]["noise_deviation"] == want
    assert found.state["w"].std() == pytest.approx(want, rel=6 / math.sqrt(2 * 400_000))


def test_a_change_is_taken_against_what_the_site_was_sent() -> None:
    state, sent = {"w": np.array([1.0], np.float32)}, {"w": np.array([0.5], np.float32)}
    config = resolve(None, [*PRIVATE, "train.mode=full"])
    strategy = build(config, Layout.from_arrays(state), {})
    order = strategy.orders(sent, [Seat("s0")], 0)["s0"]
    assert order.known["w"][0] == 0.5
    found = PrivateMean(strategy).aggregate(
        state,
        [SiteUpdate("s0", 1.0, {"w": np.array([1.5], np.float32)})],
        num_asked=2.0,
        before_release=lambda: np.zeros,
    )
    assert found.state["w"].tolist() == [1.0 + 1.0 / 2]


def test_counters_and_flags_stay_the_servers() -> None:
    state = {"w": np.zeros(1, np.float32), "n": np.array([3]), "flag": np.array([True])}
    update = {"w": np.ones(1, np.float32), "n": np.array([9]), "flag": np.array([False])}
    found = private_mean(state, [update]).state
    assert found["n"].tolist() == [3] and found["flag"].tolist() == [True]


def test_low_precision_states_are_summed_in_double_and_keep_their_dtype() -> None:
    state = {"w": np.array([1.0, 256.0], ml_dtypes.bfloat16)}
    update = {"w": np.array([1.5, 256.0], ml_dtypes.bfloat16)}
    found = private_mean(state, [update] * 4).state["w"]
    assert found.dtype == ml_dtypes.bfloat16
    assert found.astype(float).tolist() == [1.5, 256.0]


def test_a_server_optimizer_runs_after_the_noise() -> None:
    state = {"w": np.zeros(2, np.float32)}
    found = private_mean(
        state,
        [state],
        "server.optimizer=fedavgm",
        "server.learning-rate=0.5",
        normal=lambda num: np.arange(1.0, num + 1),
    )
    # Noise 1.5 * 2 / 4 * (1, 2), then half a step of it.
    assert found.state["w"].tolist() == [0.375, 0.75]


def test_f41_updates_that_overflow_any_norm_count_as_nothing() -> None:
    state = {"w": np.zeros(2, np.float64)}
    huge = {"w": np.array([1e300, -1e300])}
    assert private_mean(state, [huge, {"w": np.array([1.0, 0.0])}]).state["w"].tolist() == [0.25, 0.0]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.method=carry", "run.method"),
        ("run.method=flora", "run.method"),
        ("clients.normalise=received", "clients.normalise"),
        ("clients.weighting=tokens", "clients.weighting"),
        ("clients.max-norm-ratio=10", "clients.max-norm-ratio"),
        ("compression.feedback=1", "compression.feedback"),
        ("telemetry.keep-updates=true", "telemetry.keep-updates"),
        ("privacy.noise-multiplier=0", "privacy.noise-multiplier"),
        ("privacy.clip-norm=0", "privacy.noise-multiplier"),
        ("privacy.delta=0.5", "privacy.delta"),
        ("privacy.noise-source=pseudo", "privacy.noise-source"),
    ],
)
def test_f40_what_breaks_the_guarantee_is_refused_by_name(override, key) -> None:
    resolve(None, PRIVATE)
    with pytest.raises(ConfigError, match="Allowed:") as caught:
        resolve(None, [*PRIVATE, override])
    assert caught.value.key == key
    assert caught.value.got is not None


def test_f40_a_refused_update_must_not_be_replaced_by_another_sites() -> None:
    with pytest.raises(ConfigError, match="replaced by another"):
        resolve(None, [*PRIVATE, "clients.goal=3", "clients.minimum=3"])
    resolve(None, [*PRIVATE, "clients.goal=3", "clients.minimum=3", "clients.over-provision=1.0"])


def test_f40_the_robust_merges_and_late_updates_are_refused_whichever_check_comes_first() -> None:
    for override in ("clients.merge=coordinate-median", "clients.late=weight"):
        with pytest.raises(ConfigError):
            resolve(None, [*PRIVATE, "clients.quorum=3", "clients.minimum=3", override])


def test_a_budget_alone_is_no_privacy() -> None:
    with pytest.raises(ConfigError, match="without privacy.clip-norm"):
        resolve(None, ["privacy.budget-epsilon=3"])
