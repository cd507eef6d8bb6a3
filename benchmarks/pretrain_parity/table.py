"""The tables and the curve of loss against bytes, from the log."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
HEAD = "| arm | held-out loss | vs data-parallel | rounds | MB up | MB down | less traffic | seeds |"
RULE = "|---|---|---|---|---|---|---|---|"


def by_arm(rows: Rows) -> dict[str, Rows]:
    """Group rows by arm, in order of first appearance."""
    found: dict[str, Rows] = defaultdict(list)
    for row in rows:
        found[row["arm"]].append(row)
    return dict(found)


def mean_sd(values: list[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def total_bytes(row: dict[str, Any]) -> int:
    """Return the bytes of both directions."""
    return int(row["bytes_up"] + row["bytes_down"])


def summarise(rows: Rows) -> list[dict[str, Any]]:
    """Return one line an arm: losses, gap to the better data-parallel arm of the same seeds, traffic."""
    arms = by_arm(rows)
    parallel = {name: found for name, found in arms.items() if "parallel" in name}
    best = min(parallel, key=lambda n: mean_sd([r["heldout"] for r in parallel[n]])[0]) if parallel else ""
    reference = {r["seed"]: r for r in parallel.get(best, [])}
    lines = []
    for name, found in arms.items():
        loss, spread = mean_sd([r["heldout"] for r in found])
        shared = [(r, reference[r["seed"]]) for r in found if r["seed"] in reference]
        gaps = [r["heldout"] / base["heldout"] - 1.0 for r, base in shared]
        ratios = [total_bytes(base) / total_bytes(r) for r, base in shared if total_bytes(r)]
        lines.append(
            {
                "arm": name,
                "loss": loss,
                "sd": spread,
                "gap": mean_sd(gaps) if gaps else None,
                "less": statistics.fmean(ratios) if ratios else None,
                "up": statistics.fmean(r["bytes_up"] for r in found) / 1e6,
                "down": statistics.fmean(r["bytes_down"] for r in found) / 1e6,
                "rounds": found[0]["rounds"],
                "seeds": len(found),
            }
        )
    return lines


def table(rows: Rows) -> str:
    """Return a Markdown table."""
    lines = [HEAD, RULE]
    for row in summarise(rows):
        gap = "–" if row["gap"] is None else f"{100 * row['gap'][0]:+.2f} ± {100 * row['gap'][1]:.2f} %"
        less = "–" if row["less"] is None else f"{row['less']:,.0f}x"
        lines.append(
            f"| {row['arm']} | {row['loss']:.4f} ± {row['sd']:.4f} | {gap} | {row['rounds']} | {row['up']:,.2f} | "
            f"{row['down']:,.2f} | {less} | {row['seeds']} |"
        )
    return "\n".join(lines)


def render(rows: Rows) -> str:
    """Return the warm and the cold table as text."""
    warm = [r for r in rows if not r["arm"].startswith("cold ")]
    cold = [r for r in rows if r["arm"].startswith("cold ")]
    parts = ["From one common warm checkpoint", "", table(warm)]
    if cold:
        parts += ["", "From random weights, no warm phase", "", table(cold)]
    return "\n".join(parts)


def curve(rows: Rows, path: Path) -> None:
    """Draw held-out loss against total bytes of both directions, one point an arm, as an SVG file."""
    points = [r for r in summarise(rows) if r["up"] + r["down"] > 0 and not r["arm"].startswith("cold ")]
    import math

    xs = [math.log10((p["up"] + p["down"]) * 1e6) for p in points]
    ys = [p["loss"] for p in points]
    left, right = math.floor(min(xs)), math.ceil(max(xs))
    low, high = min(ys) - 0.01, min(max(ys), min(ys) + 0.35) + 0.01

    def place(x: float, y: float) -> tuple[float, float]:
        return 70 + 620 * (x - left) / (right - left), 20 + 380 * (high - min(y, high)) / (high - low)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 460" font-family="sans-serif" font-size="12">',
        '<rect width="960" height="460" fill="white"/>',
    ]
    for decade in range(left, right + 1):
        x, _ = place(decade, high)
        parts.append(f'<line x1="{x:.0f}" y1="20" x2="{x:.0f}" y2="400" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.0f}" y="418" text-anchor="middle">{10 ** (decade - 6):g} MB</text>')
    for step in range(5):
        y = low + (high - low) * step / 4
        _, at = place(left, y)
        parts.append(f'<line x1="70" y1="{at:.0f}" x2="690" y2="{at:.0f}" stroke="#eee"/>')
        parts.append(f'<text x="62" y="{at + 4:.0f}" text-anchor="end">{y:.3f}</text>')
    order = sorted(range(len(points)), key=lambda i: ys[i])
    for rank, index in enumerate(order, start=1):
        x, y = place(xs[index], ys[index])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="#35618f"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="white" font-size="10">{rank}</text>'
        )
        legend = f"{rank}  {points[index]['arm']}  {ys[index]:.3f}"
        parts.append(f'<text x="705" y="{16 + 20 * rank}">{legend}</text>')
    parts.append(
        '<text x="380" y="445" text-anchor="middle">bytes of all sites, up and down, whole arm</text>'
    )
    parts.append("</svg>")
    path.write_text("\n".join(parts) + "\n", "utf-8")
