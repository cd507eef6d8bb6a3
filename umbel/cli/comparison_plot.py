"""The picture of a comparison: held-out loss of every method over target tokens and over bytes moved.

Means over the seeds at each state that all seeds of a method were scored on. Plain SVG with its own colours, readable
on light and dark pages. An arm that exchanges nothing is in the left panel alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from umbel.cli.arms import ARMS
from umbel.cli.protocols import plain_and_disturbed
from umbel.telemetry import units
from umbel.telemetry.charts import nice_ticks

COLOURS = (
    "#3566c8",
    "#bf4f17",
    "#1f7f74",
    "#6b4fa0",
    "#a03050",
    "#6a7a10",
    "#0d7ea8",
    "#8a5a2b",
    "#4a4a4a",
)
DASHES = ("", "6 3", "2 3")
WIDTH, PANEL, LEFT, TOP, BOTTOM = 900, 300, 62, 40, 44
Line = list[tuple[float, float]]


def mean_lines(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Line]:
    """Return {method: [(mean of `key` so far, mean loss)]} in order of the states."""
    runs, _ = plain_and_disturbed([dict(r) for r in rows])
    found = {}
    for method, of in runs.items():
        points = [{p["round"]: p for p in run["curve"]} for run in of]
        shared = sorted(set.intersection(*(set(p) for p in points)))
        found[method] = [
            (statistics.fmean(p[s][key] for p in points), statistics.fmean(p[s]["loss"] for p in points))
            for s in shared
        ]
    return found


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the SVG; empty when no run was scored."""
    tokens = mean_lines(rows, "tokens")
    moved = {m: line for m, line in mean_lines(rows, "bytes").items() if m not in ARMS}
    if not any(tokens.values()):
        return ""
    height = TOP + PANEL + BOTTOM + 18 * -(-len(tokens) // 5)
    half = WIDTH / 2
    losses = [y for line in tokens.values() for _, y in line]
    ticks = nice_ticks(min(losses), max(losses))
    order = {m: i for i, m in enumerate(tokens)}
    body = _panel(0, half, tokens, order, ticks, "target tokens", lambda x: f"{x:g}")
    if moved:
        body += _panel(half, half, moved, order, ticks, "bytes up and down", units.size)
    for m, i in order.items():
        x, y = 20 + (i % 5) * 175, TOP + PANEL + BOTTOM + 14 + 18 * (i // 5)
        body += f'<path d="M{x} {y - 4}h22" {_stroke(i)}/><text x="{x + 28}" y="{y}">{escape(m)}</text>'
    title = "Held-out loss of each method, means over the seeds"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#1b2330"><title>{title}</title><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="20" y="22" font-size="15">{title}</text>{body}</svg>\n'
    )


def _stroke(index: int) -> str:
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return f'fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2" stroke-dasharray="{dash}"'


def _panel(
    x0: float,
    width: float,
    lines: Mapping[str, Line],
    order: Mapping[str, int],
    ticks: Sequence[float],
    label: str,
    show: Callable[[float], str],
) -> str:
    right = x0 + width - 16
    most = max((x for line in lines.values() for x, _ in line), default=1.0) or 1.0

    def px(x: float) -> float:
        return x0 + LEFT + (right - x0 - LEFT) * x / most

    def py(y: float) -> float:
        return TOP + PANEL * (ticks[-1] - y) / (ticks[-1] - ticks[0])

    parts = []
    for y in ticks:
        parts.append(f'<path d="M{x0 + LEFT} {py(y):.1f}H{right}" stroke="#d8dde5"/>')
        parts.append(f'<text x="{x0 + LEFT - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        parts.append(
            f'<text x="{px(share * most):.1f}" y="{TOP + PANEL + 16}" text-anchor="{anchor}">'
            f"{escape(show(share * most))}</text>"
        )
    parts.append(
        f'<text x="{px(most / 2):.1f}" y="{TOP + PANEL + 34}" text-anchor="middle" fill="#566173">{label}</text>'
    )
    for method, line in lines.items():
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" {_stroke(order[method])}/>')
    return "".join(parts)
