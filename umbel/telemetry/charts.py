"""Inline SVG charts for the report: lines with a band, stacked bars, a map of cells. Pure text in, text out.

No script, no font file, no image: colours are CSS classes of the page, so they follow print and dark mode.
Every chart is one `<svg role="img">` with `<title>` and `<desc>`; the numbers stand in a table beside it.
Labels are escaped here. What a number means, and how it is written, is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 760, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
MAX_BARS = 60


class Series(NamedTuple):
    """One line: (x, y) points in order of x, and the CSS class that colours it."""

    label: str
    css: str
    points: Sequence[tuple[float, float]]


class Layer(NamedTuple):
    """One layer of stacked bars: a value a bar."""

    label: str
    css: str
    values: Sequence[float]


def nice_ticks(low: float, high: float, num: int = 6) -> list[float]:
    """Round, increasing tick values that cover [low, high]: about `num`, steps of 1, 2, 2.5 or 5 x 10^k."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-200):
        pad = 0.1 * abs(low) if abs(low) > 1e-200 else 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / max(1, num - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5) if m * power >= raw * 0.999), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def index_ticks(low: int, high: int, num: int = 10) -> list[int]:
    """At most about `num` whole numbers within [low, high], multiples of a round step."""
    if low == high:
        return [low]
    raw = max(1, math.ceil((high - low) / max(1, num)))
    power = 10 ** (len(str(raw)) - 1)
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [*range(-(-low // step) * step, high + 1, step)]


def line_chart(
    ident: str,
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    band: Sequence[tuple[float, float, float]] = (),
    band_css: str = "c-heldout",
    x_label: str = "round",
    y_format: Callable[[float], str] = lambda y: f"{y:g}",
) -> str:
    """Lines over whole-number x, with an optional (x, low, high) band behind them."""
    xs = [x for s in series for x, _ in s.points] + [b[0] for b in band]
    ys = [y for s in series for _, y in s.points] + [v for b in band for v in b[1:]]
    if not xs:
        return ""
    ticks = nice_ticks(min(ys), max(ys))
    low, high = int(min(xs)), int(max(xs))

    def px(x: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * ((x - low) / (high - low) if high > low else 0.5)

    def py(y: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (y - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [
        _y_axis(ticks, py, y_format),
        _x_axis([(px(x), str(x)) for x in index_ticks(low, high)], x_label),
    ]
    if band:
        path = [f"{px(x):.1f},{py(hi):.1f}" for x, _, hi in band]
        path += [f"{px(x):.1f},{py(lo):.1f}" for x, lo, _ in reversed(band)]
        parts.append(f'<polygon class="band {band_css}" points="{" ".join(path)}"/>')
    for s in series:
        path = [f"{px(x):.1f},{py(y):.1f}" for x, y in s.points]
        parts.append(f'<polyline class="line {s.css}" points="{" ".join(path)}"/>')
        if len(path) <= 40:
            dots = (f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3"/>' for p in path)
            parts.append(f'<g class="dot {s.css}">{"".join(dots)}</g>')
    return _svg(ident, title, description, HEIGHT, "".join(parts))


def stacked_bars(
    ident: str,
    title: str,
    description: str,
    labels: Sequence[int],
    layers: Sequence[Layer],
    *,
    x_label: str = "round",
    y_format: Callable[[float], str] = lambda y: f"{y:g}",
) -> str:
    """One bar a label, layers from the bottom up; more than MAX_BARS labels are shown as means of groups."""
    if not labels:
        return ""
    per = group_size(len(labels))
    groups = [slice(i, i + per) for i in range(0, len(labels), per)]
    heights = [[sum(layer.values[g]) / len(labels[g]) for g in groups] for layer in layers]
    ticks = nice_ticks(0.0, max(sum(column) for column in zip(*heights)) or 1.0)
    pitch = (WIDTH - _LEFT - _RIGHT) / len(groups)
    bar = min(pitch * 0.72, 46.0)

    def py(y: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * y / ticks[-1]

    centres = [_LEFT + pitch * (i + 0.5) for i in range(len(groups))]
    named = index_ticks(0, len(groups) - 1) if len(groups) > 12 else range(len(groups))
    marks = [(centres[i], str(labels[groups[i]][0])) for i in named]
    parts = [_y_axis(ticks, py, y_format), _x_axis(marks, x_label)]
    base = [0.0] * len(groups)
    for layer, values in zip(layers, heights):
        rects = []
        for i, value in enumerate(values):
            if value > 0:
                top, bottom = py(base[i] + value), py(base[i])
                x = centres[i] - bar / 2
                rects.append(f"M{x:.1f} {bottom:.1f}v{top - bottom:.1f}h{bar:.1f}v{bottom - top:.1f}z")
                base[i] += value
        parts.append(f'<path class="fill {layer.css}" d="{"".join(rects)}"/>')
    return _svg(ident, title, description, HEIGHT, "".join(parts))


def sparkline(points: Sequence[tuple[float, float]], css: str = "c-train") -> str:
    """A small line without axes for a table cell, hidden from screen readers: the numbers stand beside it."""
    if len(points) < 2:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    wide, high = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
    path = [f"{2 + 116 * (x - min(xs)) / wide:.1f},{20 - 16 * (y - min(ys)) / high:.1f}" for x, y in points]
    return (
        '<svg class="spark" aria-hidden="true" viewBox="0 0 120 24" xmlns="http://www.w3.org/2000/svg">'
        f'<polyline class="line {css}" points="{" ".join(path)}"/></svg>'
    )


def group_size(num: int) -> int:
    """How many labels one bar stands for."""
    return max(1, math.ceil(num / MAX_BARS))


def cell_map(
    ident: str,
    title: str,
    description: str,
    columns: Sequence[int],
    rows: Sequence[tuple[str, Sequence[str]]],
    glyphs: dict[str, str],
    *,
    x_label: str = "round",
) -> str:
    """A grid of one coloured cell a (row, column); `rows` hold a state a column, class `s-STATE`.

    Wide cells also carry the state's glyph, so that colour is not the only sign.
    """
    if not columns or not rows:
        return ""
    left = 14 + 6.6 * min(22, max(len(name) for name, _ in rows))
    pitch_x = min(30.0, (WIDTH - left - _RIGHT) / len(columns))
    pitch_y = 22 if len(rows) <= 16 else 15
    gap_x, gap_y = (2 if pitch_x >= 8 else 0.5 if pitch_x >= 3 else 0), 2
    paths: dict[str, list[str]] = {}
    texts: list[str] = []
    for y, (name, states) in enumerate(rows):
        top = _TOP + y * pitch_y
        texts.append(
            f'<text class="tick end" x="{left - 8:.1f}" y="{top + pitch_y / 2 + 4:.1f}">{_short(name)}</text>'
        )
        for first, last, state in _runs(states, merge=gap_x == 0):
            x, width = left + first * pitch_x, (last - first) * pitch_x - gap_x
            paths.setdefault(state, []).append(f"M{x:.1f} {top}h{width:.1f}v{pitch_y - gap_y}h{-width:.1f}z")
            if pitch_x >= 12 and glyphs.get(state):
                centre, line = x + width / 2, top + pitch_y / 2 + 3.5
                texts.append(
                    f'<text class="glyph g-{state}" x="{centre:.1f}" y="{line:.1f}">{glyphs[state]}</text>'
                )
    shapes = "".join(f'<path class="s-{escape(s)}" d="{"".join(d)}"/>' for s, d in sorted(paths.items()))
    height = _TOP + pitch_y * len(rows) + _BOTTOM
    most = max(1, int(pitch_x * len(columns) / 30))
    named = {*index_ticks(min(columns), max(columns), min(most, 20))}
    marks = [(left + (i + 0.5) * pitch_x - gap_x / 2, str(c)) for i, c in enumerate(columns) if c in named]
    middle = left + pitch_x * len(columns) / 2
    axis = _x_axis(marks, x_label, bottom=height - _BOTTOM, middle=middle)
    return _svg(ident, title, description, height, axis + shapes + "".join(texts))


def _runs(states: Sequence[str], *, merge: bool) -> list[tuple[int, int, str]]:
    """(first, end, state) of each cell, or of each run of equal cells where they touch anyway."""
    runs: list[tuple[int, int, str]] = []
    for i, state in enumerate(states):
        if merge and runs and runs[-1][2] == state:
            runs[-1] = (runs[-1][0], i + 1, state)
        else:
            runs.append((i, i + 1, state))
    return runs


def _y_axis(ticks: Sequence[float], py: Callable[[float], float], fmt: Callable[[float], str]) -> str:
    lines = []
    for value in ticks:
        y = py(value)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{escape(fmt(value))}</text>')
    return "".join(lines)


def _x_axis(
    marks: Sequence[tuple[float, str]],
    label: str,
    bottom: float = HEIGHT - _BOTTOM,
    middle: float | None = None,
) -> str:
    names = "".join(
        f'<text class="tick mid" x="{x:.1f}" y="{bottom + 15:.1f}">{escape(text)}</text>' for x, text in marks
    )
    middle = (_LEFT + WIDTH - _RIGHT) / 2 if middle is None else middle
    return names + f'<text class="axis mid" x="{middle:.1f}" y="{bottom + 30:.1f}">{escape(label)}</text>'


def _short(name: str) -> str:
    return escape(name if len(name) <= 22 else name[:21] + "…")


def _svg(ident: str, title: str, description: str, height: float, body: str) -> str:
    return (
        f'<svg role="img" aria-labelledby="{ident}-t {ident}-d" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'xmlns="http://www.w3.org/2000/svg"><title id="{ident}-t">{escape(title)}</title>'
        f'<desc id="{ident}-d">{escape(description)}</desc>{body}</svg>'
    )
