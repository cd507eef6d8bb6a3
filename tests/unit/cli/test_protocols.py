"""Three protocols over hand-made runs, and the picture of them."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from umbel.cli.comparison_plot import mean_lines, plot
from umbel.cli.protocols import cost, curve, protocols, quality, robustness, text
from umbel.telemetry.history import History


def run(method: str, seed: int, losses, bytes_a_round: int = 100, outcome: str = "completed"):
    points = [
        {"round": i, "loss": loss, "bytes": i * bytes_a_round, "tokens": 10 * i, "seconds": 2.0 * i}
        for i, loss in enumerate(losses)
    ]
    return {"method": method, "seed": seed, "outcome": outcome, "curve": points}


ROWS = [
    run("fedit", 1, (4.0, 3.0, 2.0)),
    run("fedit", 2, (4.0, 3.2, 2.2)),
    run("carry", 1, (4.0, 2.4, 1.0), 300),
    run("carry", 2, (4.0, 2.6, 1.2), 300),
    run("local", 1, (4.0, 3.5)),
    run("local", 2, (4.0, 3.7)),
    run("carry disturbed", 1, (4.0, 2.6, 1.5), 300),
    run("carry disturbed", 2, (4.0, 2.8, 1.5), 300),
    run("ffa", 1, (4.0, 0.1), outcome="failed"),
]


def test_quality_is_the_last_state_within_the_budget() -> None:
    found = quality(ROWS)
    assert found["budget_bytes"] == 200
    assert found["methods"]["fedit"]["loss"] == pytest.approx(2.1)
    assert found["methods"]["fedit"]["spread"] == pytest.approx(0.02**0.5)
    assert found["methods"]["carry"]["loss"] is None
    assert found["methods"]["local"]["loss"] == pytest.approx(3.6)
    assert "ffa" not in found["methods"]
    wider = quality(ROWS, 599)["methods"]["carry"]
    assert (wider["loss"], wider["rounds"]) == (pytest.approx(2.5), 1)


def test_cost_is_paid_until_the_target_is_first_reached() -> None:
    found = cost(ROWS)
    assert found["target_loss"] == pytest.approx(2.1)
    one, two = found["methods"]["fedit"], found["methods"]["carry"]
    assert (one["reached"], one["runs"], one["bytes"], one["tokens"]) == (1, 2, 200, 20)
    assert (two["reached"], two["rounds"], two["bytes"], two["seconds"]) == (2, 2, 600, 4.0)
    assert found["methods"]["local"]["reached"] == 0
    assert cost(ROWS, 2.5)["methods"]["carry"]["rounds"] == 1.5


def test_robustness_pairs_the_seeds() -> None:
    found = robustness(ROWS)["methods"]
    assert found["carry"]["increase"] == pytest.approx((0.5 + 0.3) / 2)
    assert found["carry"]["pairs"] == 2
    assert found["fedit"]["increase"] is None
    assert set(found) == {"fedit", "carry", "local"}


def test_a_curve_counts_what_was_moved_before_each_state() -> None:
    history = History()
    for index in (1, 2):
        updates = {"a": 7 * index, "b": 1}
        history.add({"event": "round_opened", "round": index})
        for site, tokens in updates.items():
            history.add({"event": "update_accepted", "round": index, "site": site, "tokens": tokens})
        history.add(
            {
                "event": "round_committed",
                "round": index,
                "outcome": "commit",
                "accepted": [{"site": s} for s in updates],
                "bytes_up": 10 * index,
                "bytes_down": 100,
            }
        )
        history.add({"event": "evaluated", "round": index, "where": "server", "loss": 3.0 - index})
    points = curve(history)
    assert [(p["round"], p["loss"], p["bytes"], p["tokens"]) for p in points] == [
        (1, 2.0, 110, 8),
        (2, 1.0, 230, 23),
    ]
    assert [p["tokens"] for p in curve(history, 2)] == [4, 11]


def test_the_tables_say_what_was_not_reached_and_what_disturbed() -> None:
    lines = text(protocols(ROWS), ["data.limit=8"])
    assert "| carry | dearer than the budget | - |" in lines
    assert any(line.startswith("| fedit | 1 of 2 | 2.0 | 20 | 200 B |") for line in lines)
    assert "Robustness, disturbed by data.limit=8" in lines
    assert any(line.startswith("| carry | 2 | 1.1000 +- 0.1414 | 1.5000 | 0.4000") for line in lines)


def test_the_picture_has_a_line_a_method_and_none_over_bytes_for_an_arm() -> None:
    assert mean_lines(ROWS, "bytes")["carry"] == [
        (0, 4.0),
        (300, pytest.approx(2.5)),
        (600, pytest.approx(1.1)),
    ]
    root = ET.fromstring(plot(ROWS))
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 3 + 2
    assert plot([]) == ""
