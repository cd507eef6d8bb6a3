"""The report's sections on exactness, distortion and everything else that a method measured.

exactness   relative error of the served adapter against the mean of the sites' products, each committed round
distortion  |residual| / |change| of each site: what a lossy codec has not sent yet, as a multiple of one update
measures    any other number in the events, by name: first, last, lowest, highest and a small line
"""

from __future__ import annotations

from statistics import fmean

from umbel.telemetry.charts import Series, line_chart, sparkline
from umbel.telemetry.history import History
from umbel.telemetry.page import Markup, details, figure, paragraph, section, table
from umbel.telemetry.units import DASH
from umbel.telemetry.verdict import certificate


def exactness_section(history: History) -> str:
    """How far the result is from the exact mean, and what the codec holds back."""
    exact = [(r.round, r.exactness_error) for r in history.committed if r.exactness_error is not None]
    ratios = [(r.round, r.residual_ratios()) for r in history.committed]
    ratios = [(index, values) for index, values in ratios if values]
    parts = [paragraph(certificate(history), "wide")] if exact else []
    if exact:
        chart = line_chart(
            "chart-exactness",
            "Relative error against the exact mean, by round",
            f"From {exact[0][1]:.1e} to {exact[-1][1]:.1e}.",
            [Series("relative error", "c-exact", exact)],
            y_format=lambda y: f"{y:.1e}" if y else "0",
        )
        parts.append(figure(chart, [("relative error of the served adapter", "c-exact")]))
    if ratios:
        chart = line_chart(
            "chart-residual",
            "Residual ratio by round",
            f"Mean over the sites, from {fmean(ratios[0][1]):.2f} to {fmean(ratios[-1][1]):.2f}.",
            [Series("mean of the sites", "c-residual", [(i, fmean(v)) for i, v in ratios])],
            band=[(i, min(v), max(v)) for i, v in ratios if len(v) > 1],
            band_css="c-residual",
        )
        note = "Distortion: what the codec has not sent yet, as a multiple of one update; it is sent later."
        entries = [("mean of the sites", "c-residual"), ("lowest to highest site", "c-residual band")]
        parts += [paragraph(note, "muted"), figure(chart, entries)]
    if not parts:
        return ""
    known = dict(exact)
    means = dict(ratios)
    rows = [
        [
            str(index),
            f"{known[index]:.2e}" if index in known else DASH,
            f"{fmean(means[index]):.3f}" if index in means else DASH,
            f"{max(means[index]):.3f}" if index in means else DASH,
        ]
        for index in sorted({*known, *means})
    ]
    header = ["Round", "Relative error", "Residual ratio, mean", "highest"]
    values = table("Exactness and distortion by round", header, rows, range(4))
    return section("exactness", "Exactness and distortion", *parts, details("Exactness values", values))


def measures_section(history: History) -> str:
    """Everything that was measured and has no chart of its own."""
    rows = []
    for name, points in history.measures().items():
        values = [value for _, value in points]
        shown = [f"{v:.6g}" for v in (values[0], values[-1], min(values), max(values))]
        rows.append([name, str(len(points)), *shown, Markup(sparkline(points))])
    if not rows:
        return ""
    header = ["Measure", "Rounds", "First", "Last", "Lowest", "Highest", "Course"]
    body = table("Means over the events of a round; names as in events.jsonl", header, rows, range(1, 6))
    return section(
        "measures", "Further measures", details(f"{len(rows)} measures", body, is_open=len(rows) <= 24)
    )
