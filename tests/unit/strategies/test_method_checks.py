"""Methods as the server builds them: refusals in words, the server optimiser, orders for sites of different rank."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from compression import Layout
from strategies import METHODS, Seat, SiteUpdate, build
from umbel.config import resolve
from umbel.config.schema import METHODS as NAMES
from umbel.errors import ConfigError
from umbel.exchange import A, B
from umbel.methods import rank_of_site

RNG = np.random.default_rng(3)
RANK, INP, OUT = 4, 6, 10
STATE = {
    "m.lora_A.weight": RNG.normal(size=(RANK, INP)).astype(np.float32),
    "m.lora_B.weight": RNG.normal(size=(OUT, RANK)).astype(np.float32),
}
SETTINGS = ("lora.rank=4", "lora.alpha=8", "run.rounds=2", "lora.heads=2")


def made(method: str, *overrides: str):
    config = resolve(None, [*SETTINGS, f"run.method={method}", *overrides])
    return build(config, Layout.from_arrays(STATE), {"m": 2.0})


def test_d09_the_registry_and_the_setting_name_the_same_methods() -> None:
    assert tuple(METHODS) == NAMES


def test_the_maths_do_not_load_flower() -> None:
    code = "import sys, strategies, strategies.aggregation.mean; print('flwr' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("method", "setting", "words"),
    [
        ("fedit", "lora.site-ranks=a=2", "different ranks"),
        ("ffa", "lora.site-ranks=a=2", "flexlora or carry"),
        ("rolora", "clients.late=weight", "fedit or ffa"),
        ("carry", "clients.late=weight", "fedit or ffa"),
        ("carry", "server.optimizer=fedadam", "fixed basis"),
        ("flexlora", "server.optimizer=nesterov", "fixed basis"),
        ("fedex", "lora.carry-rank=4", "carry"),
        ("flora", "train.optimizer-state=keep", "keeps the factors"),
        ("fedplora", "train.optimizer-state=keep", "other modules"),
        ("fedask", "run.rounds=3", "even"),
        ("ravan", "lora.heads=3", "divide"),
        ("fedsa", "eval.sample-prompt=hello", "global model"),
        ("ecolora", "clients.normalise=fixed", "segment"),
        ("hetlora", "lora.site-ranks=a=8", "exceeds lora.rank"),
        ("hetlora", "lora.site-ranks=a", "site=rank"),
        ("carry", "telemetry.keep-updates=true", "whole adapter"),
        ("ffa", "train.mode=full", "train.mode"),
    ],
)
def test_wrong_combinations_are_refused_in_words(method: str, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(method, setting)


def test_patterns_and_site_ranks_do_not_mix() -> None:
    with pytest.raises(ConfigError, match="one rank a site"):
        made("flexlora", "lora.site-ranks=a=2", "lora.rank-pattern=q_proj=2")


def test_a_sites_rank_comes_from_the_run_then_from_the_site() -> None:
    config = resolve(None, [*SETTINGS, "lora.site-ranks=a=2"])
    assert [rank_of_site(config, s, r) for s, r in (("a", 0), ("a", 3), ("b", 0), ("b", 3), ("b", 99))] == [
        2,
        2,
        4,
        3,
        4,
    ]


def test_sites_of_one_rank_share_one_frame_and_the_cut_keeps_the_product_of_its_directions() -> None:
    """Rule 0 on the way down: s_i B_i A_i of the cut is s B[:, :r] A[:r], whatever the site's own scale."""
    strategy = made("flexlora", "lora.site-ranks=b=2")
    orders = strategy.orders(STATE, [Seat("a"), Seat("b", rank=1), Seat("c"), Seat("d", rank=2)], 0)
    assert orders["a"] is orders["c"]
    assert orders["b"] is orders["d"]
    cut, scale = orders["b"].down, orders["b"].scales["m"]
    assert scale == 4.0
    want = 2.0 * STATE["m" + B][:, :2].astype(np.float64) @ STATE["m" + A][:2]
    assert np.abs(scale * cut["m" + B].astype(np.float64) @ cut["m" + A] - want).max() <= 1e-5


def test_carry_for_a_smaller_site_is_the_whole_update() -> None:
    strategy = made("carry", "lora.site-ranks=b=1")
    order = strategy.orders(STATE, [Seat("a"), Seat("b")], 0)["b"]
    d = {n: a.astype(np.float64) for n, a in order.down.items()}
    got = order.scales["m"] * d["m" + B] @ d["m" + A] + d["m.carry_B"] @ d["m.carry_A"]
    want = 2.0 * STATE["m" + B].astype(np.float64) @ STATE["m" + A]
    assert d["m" + A].shape[0] == 1
    assert np.abs(got - want).max() <= 1e-5


def test_the_norm_of_an_update_does_not_depend_on_what_travelled() -> None:
    """One site's B changed: FFA sends B alone, FedIT both factors; |s dB A| either way."""
    moved = STATE["m" + B] + np.float32(0.5)
    from server_app.validate import update_norm

    norms = []
    for method, update in (("fedit", {**STATE, "m" + B: moved}), ("ffa", {"m" + B: moved})):
        strategy = made(method)
        order = strategy.orders(STATE, [Seat("a")], 0)["a"]
        norms.append(update_norm(*strategy.measured(update, order)))
    want = np.linalg.norm(2.0 * (moved - STATE["m" + B]).astype(np.float64) @ STATE["m" + A])
    assert norms == [pytest.approx(want, rel=1e-6)] * 2


def updates(change: float) -> list[SiteUpdate]:
    return [
        SiteUpdate(s, w, {n: a + np.float32(change * k) for n, a in STATE.items()})
        for s, w, k in (("a", 1.0, 1), ("b", 3.0, 2))
    ]


def test_fedavgm_is_momentum_on_the_mean() -> None:
    """Two rounds of the same mean change d: first d, then d + 0.5 d; plain averaging is untouched by the setting."""
    strategy = made("fedit", "server.optimizer=fedavgm", "server.momentum=0.5")
    strategy.orders(STATE, [Seat("a"), Seat("b")], 0)
    d = 0.1 * (1 * 1 + 3 * 2) / 4
    first = strategy.aggregate(STATE, updates(0.1)).state
    assert np.allclose(first["m" + A], STATE["m" + A] + d, atol=1e-6)
    again = [
        SiteUpdate(u.site, u.weight, {n: first[n] + (a - STATE[n]) for n, a in u.arrays.items()})
        for u in updates(0.1)
    ]
    second = strategy.aggregate(first, again).state
    assert np.allclose(second["m" + A], first["m" + A] + 1.5 * d, atol=1e-6)
    kept = strategy.state_dict()
    fresh = made("fedit", "server.optimizer=fedavgm", "server.momentum=0.5")
    fresh.load_state_dict(kept)
    third = [s.aggregate(second, again).state["m" + A] for s in (strategy, fresh)]
    assert np.array_equal(*third)


@pytest.mark.parametrize("optimizer", ["fedavgm", "nesterov", "fedadam", "fedyogi", "fedadagrad"])
def test_a_frozen_factor_has_no_moments(optimizer: str) -> None:
    """FFA with every server optimiser: A keeps its bits and only B has state."""
    strategy = made("ffa", f"server.optimizer={optimizer}", "server.learning-rate=0.1")
    strategy.orders(STATE, [Seat("a"), Seat("b")], 0)
    sent = [SiteUpdate(u.site, u.weight, {"m" + B: u.arrays["m" + B]}) for u in updates(0.1)]
    got = strategy.aggregate(STATE, sent)
    assert np.array_equal(got.state["m" + A], STATE["m" + A])
    assert not np.array_equal(got.state["m" + B], STATE["m" + B])
    assert got.metrics["exactness"]["relative_error"] <= 1e-6
    assert {k.split("/", 1)[1] for k in strategy.state_dict() if not k.startswith("tau/")} == {"m" + B}


@pytest.mark.parametrize("method", ["ffa", "carry", "flexlora", "flora", "raflora", "hetlora", "fedex"])
def test_t4_the_order_of_sites_changes_nothing(method: str) -> None:
    """The engine hands updates out by name; a method that is called with the reverse gives the same bits."""
    found = []
    for turned in (False, True):
        strategy = made(method)
        strategy.orders(STATE, [Seat("a"), Seat("b")], 0)
        sent = updates(0.1)
        if method == "ffa":
            sent = [SiteUpdate(u.site, u.weight, {"m" + B: u.arrays["m" + B]}) for u in sent]
        found.append(strategy.aggregate(STATE, sent[::-1] if turned else sent).state)
    assert set(found[0]) == set(found[1])
    assert all(np.array_equal(a, found[1][n]) for n, a in found[0].items())


@pytest.mark.parametrize("method", ["ffa", "rolora", "carry", "fedex", "flora", "flexlora"])
def test_fixed_normalisation_adds_the_servers_own_share(method: str) -> None:
    """Half of the cohort's weight is missing: the result is half way between the server's product and the mean."""
    strategy = made(method, "clients.normalise=fixed")
    start = dict(STATE)
    if method == "flora":
        start["m" + B] = np.zeros_like(STATE["m" + B])
    strategy.orders(start, [Seat("a"), Seat("b")], 0)
    change = {"m" + B: start["m" + B] + np.float32(1.0)}
    whole = change if method in ("ffa", "rolora") else {"m" + A: start["m" + A], **change}
    got = strategy.aggregate(start, [SiteUpdate("a", 2.0, whole)], expected_weight=4.0).state
    product = 2.0 * got["m" + B].astype(np.float64) @ got["m" + A]
    if "m.carry_A" in got:
        product = product + got["m.carry_B"].astype(np.float64) @ got["m.carry_A"]
    want = 2.0 * (start["m" + B].astype(np.float64) + 0.5) @ start["m" + A]
    if method == "flexlora":
        u, s, vt = np.linalg.svd(want)
        want = (u[:, :4] * s[:4]) @ vt[:4]
    assert np.abs(product - want).max() <= 1e-5
