"""Exact numbers on two hand-made sites, and a run end to end over sites made of numbers."""

from __future__ import annotations

import numpy as np
from root_mean import RootMean
from support.scripted import STATE, Script, make_bench

from compression import Layout
from strategies import SiteUpdate
from umbel.config import resolve


def test_weights_1_and_9_count_as_1_and_3() -> None:
    state = {"w": np.zeros(2, np.float32)}
    method = RootMean(resolve(None, []), Layout.from_arrays(state))
    updates = [
        SiteUpdate("a", 1.0, {"w": np.array([4.0, 0.0], np.float32)}),
        SiteUpdate("b", 9.0, {"w": np.array([0.0, 8.0], np.float32)}),
    ]
    outcome = method.aggregate(state, iter(updates))
    assert outcome.state["w"].tolist() == [1.0, 6.0]
    assert outcome.metrics == {"largest_share": 0.75}


def test_one_round_end_to_end() -> None:
    run = make_bench(
        [Script("a", default=4.0, tokens=10), Script("b", default=0.0, tokens=90)], method=RootMean
    )
    record = run.engine.run_round()
    np.testing.assert_array_equal(run.engine.state["b"], STATE["b"] + np.float32(1.0))
    assert record["largest_share"] == 0.75
