"""Hazards of the wire, the registry and the start that have no other home."""

from __future__ import annotations

import numpy as np
import pytest
from support.scripted import STATE, Script, died, make_bench

from server_app.versions import differences
from strategies import METHODS, build
from umbel.config import resolve


def test_h30_an_expired_message_is_a_dropout_and_surplus_sites_idle() -> None:
    """H30: 'Message Unavailable' costs one site one round; a third site where two are wanted is just not asked."""
    scripts = [Script("a"), Script("b"), Script("c")]
    scripts[0].faults[1] = died(3, "Message Unavailable: expired due to its TTL or never existed")
    bench = make_bench(scripts)
    first = bench.engine.run_round()
    assert [e["site"] for e in first["accepted"]] == ["b", "c"]
    assert "expired" in first["rejected"][0]["reason"]
    assert [e["site"] for e in bench.engine.run_round()["accepted"]] == ["a", "b", "c"]
    surplus = make_bench(
        [Script("a"), Script("b"), Script("c")], "clients.goal=2", "clients.over-provision=1"
    )
    assert len(surplus.engine.run_round()["selected"]) == 2


def test_h40_a_differing_minor_version_is_a_warning_that_names_it() -> None:
    """H40: patch versions do not matter, a missing one is not a difference."""
    server = {"umbel": "0.1.0", "peft": "0.21.2", "transformers": "5.24.0"}
    assert differences({"peft": "0.21.9", "transformers": "5.24.0"}, server) == []
    assert differences({"peft": "0.20.0"}, server) == ["peft: site has 0.20.0, server has 0.21.2"]
    assert differences(None, server) == []
    old = Script("old", facts={"versions": {"peft": "0.20.0"}})
    bench = make_bench([Script("a"), old])
    assert [e["site"] for e in bench.of("version_differs")] == ["old"]
    assert len(bench.engine.run_round()["accepted"]) == 2


@pytest.mark.parametrize("name", sorted(METHODS))
def test_d09_every_method_that_can_be_named_can_be_built(name) -> None:
    """D09: elsewhere an advertised algorithm could not run because its name was spelt in two ways."""
    from umbel.config.keys import rule_of
    from umbel.config.load import flat_fields

    choices = rule_of(flat_fields()["run.method"][1]).choices
    assert sorted(choices) == sorted(METHODS)
    assert name in choices


def test_h20_two_gauges_of_one_update_are_stated_as_inexact() -> None:
    """H20: A1 = -A2, B1 = -B2 are the same update; averaging the factors returns zero, and the round says so."""
    from compression import Layout
    from strategies import SiteUpdate

    a, b = np.array([[1.0, 0.0]], np.float32), np.array([[1.0], [0.0]], np.float32)
    state = {"m.lora_A.weight": np.zeros((1, 2), np.float32), "m.lora_B.weight": np.zeros((2, 1), np.float32)}
    one = SiteUpdate("one", 1.0, {"m.lora_A.weight": a, "m.lora_B.weight": b})
    two = SiteUpdate("two", 1.0, {"m.lora_A.weight": -a, "m.lora_B.weight": -b})
    strategy = build(resolve(None, []), Layout.from_arrays(state), {"m": 1.0})
    outcome = strategy.aggregate(state, iter([one, two]))
    assert np.abs(outcome.state["m.lora_A.weight"]).max() == 0.0
    assert outcome.metrics["exactness"]["relative_error"] == pytest.approx(1.0)
    alone = strategy.aggregate(state, iter([one]))
    assert np.array_equal(alone.state["m.lora_A.weight"], a)
    assert alone.metrics["exactness"]["relative_error"] <= 1e-12


def test_five_sites_of_which_one_has_all_the_weight_return_it_exactly() -> None:
    """H20, D01: weights [1, 0, 0, 0, 0]; weight zero is refused at the door, so one of five counts."""
    from support.scripted import edited

    from umbel.digest import state_crc

    scripts = [Script(f"s{i}", float(i + 1)) for i in range(5)]
    for script in scripts[1:]:
        script.faults[1] = edited(weight=0.0)
    bench = make_bench(scripts, "clients.quorum=1")
    bench.engine.run_round()
    assert state_crc(bench.engine.state) == state_crc({k: v + np.float32(1.0) for k, v in STATE.items()})
