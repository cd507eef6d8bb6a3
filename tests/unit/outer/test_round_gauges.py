"""Drift, cosines and the outer step, by hand on models small enough to be exact."""

from __future__ import annotations

import numpy as np
import pytest

from strategies import SiteUpdate
from strategies.outer import gauges as module
from strategies.outer.gauges import Gauges

STATE = {"w": np.float32([3, 4]), "n": np.array(1, np.int64)}


def site(name, delta):
    return SiteUpdate(name, 1.0, {"w": STATE["w"] + np.float32(delta), "n": STATE["n"]})


def test_two_sites_at_a_right_angle():
    found = Gauges(STATE)
    passed = list(found.watch([site("a", [1, 0]), site("b", [0, 2])]))
    assert [u.site for u in passed] == ["a", "b"]
    report = found.report({"w": STATE["w"] + np.float32([0.5, 1]), "n": STATE["n"]})
    assert report["drift"] == {"a": pytest.approx(0.2), "b": pytest.approx(0.4)}
    assert report["cosine"] == pytest.approx(0.0, abs=1e-12)
    # merged (.5, 1): cosines 1/sqrt 5 and 2/sqrt 5.
    assert report["to_merge"] == pytest.approx(1.5 / np.sqrt(5))
    assert report["outer_step"] == pytest.approx(np.sqrt(1.25) / 5)


def test_opposed_equal_and_resting_sites():
    found = Gauges(STATE)
    list(found.watch([site("a", [1, 0]), site("b", [-1, 0]), site("c", [0, 0])]))
    report = found.report(STATE)
    assert report["cosine"] == pytest.approx(-1.0)
    assert "to_merge" not in report
    assert report["drift"]["c"] == 0.0
    assert Gauges(STATE).report(STATE) == {}


def test_memory_is_a_sample_whatever_the_model(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE", 100)
    state = {"w": np.ones(1000, np.float32)}
    found = Gauges(state)
    list(found.watch([SiteUpdate("a", 1.0, {"w": 1.5 * state["w"]})]))
    assert found.report(state)["drift"]["a"] == pytest.approx(0.5)
    assert found._start.size <= 100
