"""Two kinds of picture for the codec benchmarks: labelled points over a logarithmic height, and pairs of bars.

Plain SVG text with its own colours, readable on light and dark pages, without fonts or scripts from elsewhere. The
charts of a run's report (`umbel.telemetry.charts`) are lines over whole numbers and follow that page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

INK, MUTED, GRID, PAPER = "#1b2330", "#566173", "#d8dde5", "#ffffff"
COLOURS = ("#3566c8", "#bf4f17", "#1f7f74", "#6b4fa0")
WIDTH = 860


class Point(NamedTuple):
    """One codec: bits a value, distortion, its name, and the number of its group (colour and shape)."""

    x: float
    y: float
    label: str
    group: int


def scatter(
    title: str,
    points: Sequence[Point],
    groups: Sequence[str],
    *,
    curve: Sequence[tuple[float, float]],
    curve_label: str,
) -> str:
    """Return an SVG: x linear from 0, y logarithmic; `curve` is drawn as a dashed line."""
    height, left, right, top, bottom = 620, 76, 20, 64, 56
    widest = max(p.x for p in points) * 1.06
    x_step = 1.0 if widest > 3 else 0.2
    x_max = x_step * math.ceil(widest / x_step)
    low = math.floor(math.log10(min(p.y for p in points)))
    high = math.ceil(math.log10(max(p.y for p in points)))

    def px(x: float) -> float:
        return left + (WIDTH - left - right) * x / x_max

    def py(y: float) -> float:
        return height - bottom - (height - top - bottom) * (math.log10(y) - low) / (high - low)

    parts = [_text(left, 26, title, size=17, weight=600)]
    heights = [10.0**decade for decade in range(low, high + 1)]
    if high - low == 1:
        heights += [k * 10.0**low for k in range(2, 10)]
    for value in heights:
        y = py(value)
        parts.append(_line(left, y, WIDTH - right, y, GRID))
        parts.append(_text(left - 8, y + 4, f"{value:g}", anchor="end", fill=MUTED))
    below = height - bottom + 18
    steps = [x_step * i for i in range(round(x_max / x_step) + 1)]
    parts += [_text(px(x), below, f"{x:g}", anchor="middle", fill=MUTED) for x in steps]
    parts.append(
        _text((left + WIDTH) / 2, height - 14, "bits a value, scales and tables included", anchor="middle")
    )
    parts.append(_text(left, 48, "NMSE = |C(x) - x|^2 / |x|^2", fill=MUTED))
    shown = [(px(x), py(y)) for x, y in curve if x <= x_max and 10.0**low <= y <= 10.0**high]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{MUTED}" stroke-dasharray="5 5"/>')
    for number, name in enumerate(groups):
        x = WIDTH - right - 250
        parts.append(_mark(x, 22 + 19 * number, number))
        parts.append(_text(x + 12, 26 + 19 * number, name))
    parts.append(
        _line(WIDTH - right - 257, 22 + 19 * len(groups), WIDTH - right - 243, 22 + 19 * len(groups), MUTED)
    )
    parts.append(_text(WIDTH - right - 238, 26 + 19 * len(groups), curve_label, fill=MUTED))
    taken: list[tuple[float, float, float]] = []
    for p in sorted(points, key=lambda p: (p.x, p.y)):
        parts.append(_mark(px(p.x), py(p.y), p.group))
        if p.label:
            parts.append(_label(px(p.x), py(p.y), p.label, taken, right_edge=WIDTH - right))
    return _svg(title, height, parts)


def bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[float]]],
    groups: Sequence[str],
    *,
    unit: str,
    marks: Sequence[tuple[float, str]],
) -> str:
    """Return an SVG of horizontal bars, a group of them a row; `marks` are vertical lines with a name."""
    left, right, top, row = 210, 70, 74, 15 * len(groups) + 12
    height = top + row * len(rows) + 44
    most = max([v for _, values in rows for v in values] + [m for m, _ in marks])

    def px(x: float) -> float:
        return left + (WIDTH - left - right) * x / most

    parts = [_text(16, 26, title, size=17, weight=600)]
    for number, name in enumerate(groups):
        x = 16 + 150 * number
        parts.append(f'<rect x="{x}" y="40" width="11" height="11" fill="{COLOURS[number]}"/>')
        parts.append(_text(x + 17, 50, name))
    for value, name in marks:
        parts.append(_line(px(value), top - 6, px(value), height - 40, MUTED, dash="5 5"))
        parts.append(_text(px(value), top - 10, f"{name} {value:.2g}", anchor="middle", fill=MUTED))
    for index, (name, values) in enumerate(rows):
        y = top + row * index
        parts.append(_text(left - 8, y + row / 2, name, anchor="end"))
        for number, value in enumerate(values):
            at = y + 3 + 15 * number
            parts.append(
                f'<rect x="{left}" y="{at}" width="{px(value) - left:.1f}" height="12" fill="{COLOURS[number]}"/>'
            )
            parts.append(_text(px(value) + 5, at + 10, f"{value:.2f}", fill=MUTED, size=11))
    parts.append(_text((left + WIDTH) / 2, height - 12, unit, anchor="middle"))
    return _svg(title, height, parts)


def _label(
    x: float, y: float, text: str, taken: list[tuple[float, float, float]], *, right_edge: float
) -> str:
    """Place a name beside its point, above or below where others are; a thin line leads to it when it is far."""
    width = 6.4 * len(text)
    side = 1 if x + 10 + width < right_edge else -1
    start = x + 10 if side > 0 else x - 10 - width
    for shift in (0, -13, 13, -26, 26, -39, 39, -52, 52, -65, 65):
        if all(
            abs(y + shift - other_y) > 11 or start > other_x + other_w or other_x > start + width
            for other_x, other_y, other_w in taken
        ):
            break
    taken.append((start, y + shift, width))
    lead = _line(x, y, x + 8 * side, y + shift, MUTED) if abs(shift) > 13 else ""
    return lead + _text(start, y + shift + 4, text, size=11.5)


def _mark(x: float, y: float, group: int) -> str:
    colour = COLOURS[group]
    if group == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2" fill="{colour}"/>'
    place = f'x="{x - 3.8:.1f}" y="{y - 3.8:.1f}" width="7.6" height="7.6"'
    return f'<rect {place} fill="none" stroke="{colour}" stroke-width="2"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{style}/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    fill: str = INK,
    size: float = 12.5,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>' + "".join(parts) + "</svg>\n"
    )
