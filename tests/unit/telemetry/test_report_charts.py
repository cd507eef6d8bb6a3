from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.telemetry.charts import (
    Layer,
    Series,
    cell_map,
    group_size,
    index_ticks,
    line_chart,
    nice_ticks,
    stacked_bars,
)
from umbel.telemetry.report_tables import ranges

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (1.47, 3.68, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]),
        (0.0, 6.3e6, [0, 2e6, 4e6, 6e6, 8e6]),
        (2.0, 2.0, [1.8, 1.9, 2.0, 2.1, 2.2]),
        (0.0, 0.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


@settings(deadline=None)
@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_ticks_cover_the_range_and_increase(a, b):
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert all(x < y for x, y in pairwise(ticks))
    assert 2 <= len(ticks) <= 14


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30), st.integers(0, 10**30))
def test_whole_ticks_are_few_and_inside(low, span):
    ticks = index_ticks(low, low + span)
    assert len(ticks) <= 11
    assert all(low <= t <= low + span for t in ticks)
    assert ticks or span


def test_a_line_goes_through_its_points():
    svg = ET.fromstring(line_chart("a", "t", "d", [Series("s", "c", [(0, 0.0), (5, 10.0), (10, 5.0)])]))
    line = svg.find(f"{SVG}polyline")
    points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
    grid = [float(g.get("y1")) for g in svg.iter(f"{SVG}line")]
    assert [x for x, _ in points] == [62.0, 404.0, 746.0]
    assert points[0][1] == max(grid)
    assert points[1][1] == min(grid)
    assert points[2][1] == pytest.approx((max(grid) + min(grid)) / 2)


def test_the_band_lies_between_its_bounds():
    svg = ET.fromstring(line_chart("a", "t", "d", [], band=[(0, 1.0, 2.0), (1, 1.5, 3.0)]))
    points = [p.split(",") for p in svg.find(f"{SVG}polygon").get("points").split()]
    ys = [float(y) for _, y in points]
    assert len(points) == 4
    assert ys[1] < ys[0] < ys[2] < ys[3]


def test_bars_stack_to_the_sum():
    layers = [Layer("a", "a", [1.0, 2.0]), Layer("b", "b", [3.0, 0.0])]
    svg = ET.fromstring(stacked_bars("x", "t", "d", [1, 2], layers))
    bars = [re.findall(r"M([\d.]+) ([\d.]+)v(-[\d.]+)", p.get("d")) for p in svg.iter(f"{SVG}path")]
    assert [len(b) for b in bars] == [2, 1]
    (x0, y0, h0), (_, _, h1) = bars[0]
    x2, y2, h2 = bars[1][0]
    assert x2 == x0
    assert float(y2) == pytest.approx(float(y0) + float(h0), abs=0.2)
    assert float(h2) == pytest.approx(3 * float(h0), abs=0.3)
    assert float(h1) == pytest.approx(2 * float(h0), abs=0.3)


def test_many_bars_become_means_of_groups():
    assert [group_size(n) for n in (1, 60, 61, 500)] == [1, 1, 2, 9]
    svg = ET.fromstring(stacked_bars("x", "t", "d", list(range(1, 121)), [Layer("a", "a", [0.0, 2.0] * 60)]))
    heights = re.findall(r"v(-[\d.]+)", next(svg.iter(f"{SVG}path")).get("d"))
    assert len(heights) == 60
    assert len(set(heights)) == 1


def test_the_map_has_one_cell_a_site_and_round():
    rows = [("north", ["accepted", "late", "accepted"]), ("south", ["idle", "idle", "missing"])]
    svg = ET.fromstring(cell_map("m", "t", "d", [1, 2, 3], rows, {"late": "L", "missing": "?"}))
    cells = {p.get("class"): p.get("d").count("M") for p in svg.iter(f"{SVG}path")}
    assert cells == {"s-accepted": 2, "s-late": 1, "s-idle": 2, "s-missing": 1}
    texts = [t.text for t in svg.iter(f"{SVG}text")]
    assert texts == ["1", "2", "3", "round", "north", "L", "south", "?"]


def test_touching_cells_of_one_state_are_one_shape():
    states = ["accepted"] * 300 + ["missing"] * 200
    svg = ET.fromstring(cell_map("m", "t", "d", list(range(1, 501)), [("s", states)], {}))
    assert {p.get("class"): p.get("d").count("M") for p in svg.iter(f"{SVG}path")} == {
        "s-accepted": 1,
        "s-missing": 1,
    }


def test_charts_without_values_are_empty():
    assert line_chart("a", "t", "d", []) == ""
    assert stacked_bars("a", "t", "d", [], []) == ""
    assert cell_map("a", "t", "d", [], [], {}) == ""


@settings(deadline=None)
@given(st.sets(st.integers(0, 60)))
def test_ranges_name_exactly_the_numbers(numbers):
    named: list[int] = []
    for part in filter(None, ranges(numbers).split(", ")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)
