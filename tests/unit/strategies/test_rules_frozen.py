"""FFA, RoLoRA, FedSA, Fed-SB and Ravan: rules that freeze or share a factor (D04)."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.rules import fedsa, fedsb, ffa, ravan, rolora
from strategies.aggregation.rules.common import Contribution, Factors
from umbel.errors import ConfigError

RNG = np.random.default_rng(0)
A_0, B_0 = RNG.normal(size=(3, 7)), RNG.normal(size=(5, 3))
NAMES = ["q.lora_A.weight", "q.lora_B.weight", "head.weight"]


def sites():
    return [Contribution(n, w, 2.0, A_0.copy(), RNG.normal(size=(5, 3))) for n, w in (("x", 3), ("y", 1))]


def test_ffa_sends_no_a_and_keeps_the_servers_bit_for_bit_d04():
    assert ffa.travelling_names(NAMES) == NAMES[1:]
    cs = sites()
    got = ffa.aggregate(cs, A_0)
    assert got.a is A_0
    assert set(ffa.summand(cs[0])) == {"weight", "B"}
    assert np.allclose(got.b, 0.75 * cs[0].b + 0.25 * cs[1].b, atol=1e-15)


def test_ffa_refuses_a_site_that_trained_a_d04():
    cs = sites()
    cs[1] = cs[1]._replace(a=np.nextafter(A_0, 9))
    with pytest.raises(ConfigError, match="'y'"):
        ffa.aggregate(cs, A_0)


def test_refactoring_keeps_the_product_and_makes_the_rows_of_a_orthonormal():
    got = ffa.refactor(Factors(A_0, B_0))
    assert np.abs(got.b @ got.a - B_0 @ A_0).max() < 1e-13
    assert np.abs(got.a @ got.a.T - np.eye(3)).max() < 1e-13


@pytest.mark.parametrize("b", [np.zeros((5, 3)), np.outer(np.arange(5.0), [1.0, 2.0, 3.0])])
def test_refactoring_a_rank_deficient_update_still_gives_a_full_basis(b):
    """B = 0 at the start: A must stay trainable through B, so no row of it may vanish."""
    got = ffa.refactor(Factors(A_0, b))
    assert np.abs(got.b @ got.a - b @ A_0).max() < 1e-12
    assert np.abs(got.a @ got.a.T - np.eye(3)).max() < 1e-12


def test_rolora_trains_b_first_and_counts_commits_not_rounds():
    assert [rolora.phase(n) for n in range(4)] == ["B", "A", "B", "A"]


def test_rolora_leaves_the_frozen_factor_alone():
    cs, previous = sites(), Factors(A_0, B_0)
    got = rolora.aggregate(cs, "B", previous)
    assert got.a is A_0
    assert set(rolora.summand(cs[0], "B")) == {"weight", "B"}
    got = rolora.aggregate(cs, "A", previous)
    assert got.b is B_0
    assert np.allclose(got.a, A_0, atol=1e-15)


def test_fedsa_shares_a_and_only_a():
    assert fedsa.travelling_names(NAMES) == [NAMES[0], NAMES[2]]
    got = fedsa.aggregate(
        [("y", 1.0, np.full((1, 2), 4.0)), ("x", 3.0, np.zeros((1, 2))), ("z", 0, np.ones((1, 2)))]
    )
    assert got.tolist() == [[1.0, 1.0]]
    with pytest.raises(UpdateError, match="weight"):
        fedsa.aggregate([("y", float("nan"), np.ones((1, 2)))])


def test_fedsb_nested_cores_by_hand():
    """Ranks 1 and 2: the shared entry is the weighted mean, the others belong to the larger site."""
    previous = np.full((3, 3), 7.0)
    big = np.array([[4.0, 2.0], [3.0, 5.0]])
    got = fedsb.aggregate(
        previous, [("big", 1.0, big), ("small", 3.0, np.array([[8.0]])), ("gone", 0, np.eye(3))]
    )
    assert got.tolist() == [[7.0, 2.0, 7.0], [3.0, 5.0, 7.0], [7.0, 7.0, 7.0]]


def test_fedsb_sends_r_squared_numbers_and_exports_a_plain_adapter():
    core = RNG.normal(size=(3, 3))
    assert fedsb.summand(1.0, core, 3)["M"].size == 9
    got = fedsb.export(core, Factors(A_0, B_0))
    assert np.abs(got.b @ got.a - B_0 @ core @ A_0).max() < 1e-13


def test_ravan_two_of_four_heads():
    previous = np.arange(16, dtype=float).reshape(4, 2, 2)
    x, y = {0: np.eye(2), 2: 2 * np.eye(2)}, {2: 6 * np.eye(2)}
    got = ravan.aggregate(previous, [("x", 3.0, x), ("y", 1.0, y)])
    assert got[0].tolist() == np.eye(2).tolist()
    assert got[2].tolist() == (3 * np.eye(2)).tolist()
    assert np.array_equal(got[[1, 3]], previous[[1, 3]])
    assert ravan.summand(1.0, x, 4, 2)["H"].size == 4 * 2 * 2


def test_ravan_averaging_gain_and_core_apart_would_be_wrong():
    gains, cores = np.array([2.0, -1.0]), RNG.normal(size=(2, 3, 3))
    sent = [(str(i), 1.0, {0: c * h}) for i, (c, h) in enumerate(zip(gains, cores))]
    got = ravan.aggregate(np.zeros((1, 3, 3)), sent)[0]
    want = (gains[:, None, None] * cores).mean(axis=0)
    apart = gains.mean() * cores.mean(axis=0)
    assert np.abs(got - want).max() < 1e-15
    assert np.linalg.norm(apart - want) / np.linalg.norm(want) > 0.3


def test_ravan_heads_are_reproducible_and_orthonormal_across_heads():
    heads = ravan.draw_heads(5, "q", (12, 20), 3, 4)
    assert heads.a.dtype == heads.b.dtype == np.float32
    assert (heads.a.shape, heads.b.shape) == ((3, 4, 20), (3, 12, 4))
    rows = heads.a.reshape(12, 20)
    assert np.abs(rows @ rows.T - np.eye(12)).max() < 1e-6
    assert (
        np.abs(np.concatenate(heads.b, axis=1).T @ np.concatenate(heads.b, axis=1) - np.eye(12)).max() < 1e-6
    )
    assert ravan.draw_heads(5, "q", (12, 20), 3, 4).a.tobytes() == heads.a.tobytes()
    assert not np.array_equal(ravan.draw_heads(5, "k", (12, 20), 3, 4).a, heads.a)
    loose = ravan.draw_heads(5, "q", (12, 400), 4, 4, orthogonal=False)
    assert np.linalg.norm(loose.a) == pytest.approx(4.0, rel=0.05)
    with pytest.raises(UpdateError, match="span"):
        ravan.draw_heads(5, "q", (12, 20), 4, 4)
