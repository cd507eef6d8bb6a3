"""The report's charts: loss, bytes, time and participation, each with its description."""

from __future__ import annotations

from umbel.telemetry.charts import Layer, Series, cell_map, group_size, line_chart, stacked_bars
from umbel.telemetry.history import PHASES, History
from umbel.telemetry.page import details, figure, paragraph, section, table
from umbel.telemetry.records import RoundRow, number
from umbel.telemetry.units import DASH, duration, loss, size

# (state, glyph in the map, what it says). Rejected and failed look alike on paper but for the glyph.
STATES = (
    ("accepted", "", "accepted"),
    ("late", "L", "late, still counted (L)"),
    ("unused", "u", "not used: round skipped, cut off or undone (u)"),
    ("rejected", "×", "update rejected (×)"),
    ("failed", "!", "site failed (!)"),
    ("missing", "?", "no answer in time (?)"),
    ("waiting", "…", "round still open (…)"),
    ("idle", "", "not asked"),
)
_OUTCOME_STATE = {"commit": "accepted", "skip": "missing", "abort": "rejected", "open": "waiting"}


def loss_section(history: History) -> str:
    """Training loss, joint held-out loss with the band of the sites, and the server's own set."""
    lines = [
        ("training (mean of the updates)", "c-train", history.train_curve()),
        ("held-out, all sites together", "c-heldout", history.heldout_curve()),
        ("held-out, the server's own set", "c-server", history.heldout_curve("server")),
    ]
    lines = [line for line in lines if line[2]]
    band = history.heldout_band()
    told = [f"{label}: from {loss(p[0][1])} to {loss(p[-1][1])}" for label, _, p in lines]
    chart = line_chart(
        "chart-loss",
        "Loss by round",
        "; ".join(told) + ". The table below the chart holds the values.",
        [Series(label, css, points) for label, css, points in lines],
        band=band,
        y_format=lambda y: f"{y:.10g}",
    )
    if not chart:
        return section("loss", "Loss", paragraph("No loss has been recorded yet.", "muted"))
    entries = [(label, css) for label, css, _ in lines]
    if band:
        entries.append(("held-out, lowest to highest site", "c-heldout band"))
    note = "Nats a token. Held-out values belong to the state after the round; round 0 is the initial model."
    return section("loss", "Loss", paragraph(note, "muted"), figure(chart, entries), _loss_table(history))


def _loss_table(history: History) -> str:
    train, server = dict(history.train_curve()), dict(history.heldout_curve("server"))
    joint = dict(history.heldout_curve())
    band = {index: (low, high) for index, low, high in history.heldout_band()}
    rows = []
    for index in sorted({*train, *joint, *server}):
        known = history.heldout.get(index, {})
        accuracy = number(known.get("token_accuracy"))
        low, high = band.get(index, (None, None))
        rows.append(
            [
                str(index),
                loss(train.get(index)),
                loss(joint.get(index)),
                loss(low),
                loss(high),
                loss(number(known.get("perplexity"))),
                DASH if accuracy is None else f"{accuracy:.1%}",
                loss(server.get(index)),
            ]
        )
    header = [
        "Round",
        "Training",
        "Held-out",
        "Best site",
        "Worst site",
        "Perplexity",
        "Token accuracy",
        "Server",
    ]
    return details("Loss values", table("Loss by round, nats a token", header, rows, range(8)))


def traffic_section(history: History) -> str:
    """Bytes a round in both directions."""
    rows = _closed(history)
    layers = [
        Layer("received from the sites", "c-up", [float(r.bytes_up) for r in rows]),
        Layer("sent to the sites", "c-down", [float(r.bytes_down) for r in rows]),
    ]
    chart = stacked_bars(
        "chart-bytes",
        "Bytes by round",
        f"In all {size(history.bytes_up())} received and {size(history.bytes_down())} sent.",
        [r.round for r in rows],
        layers,
        y_format=size,
    )
    values = [[str(r.round), size(r.bytes_up), size(r.bytes_down)] for r in rows]
    return section(
        "bytes",
        "Traffic",
        _grouped(rows) if chart else "",
        figure(chart, [(layer.label, layer.css) for layer in layers]),
        details("Traffic values", table("Bytes by round", ["Round", "Received", "Sent"], values, range(3))),
        wire_table(history),
    )


def wire_table(history: History) -> str:
    """Bytes on the wire by site, phase and direction: whole messages, with everything around the frames."""
    rows = [
        [site, phase, size(both["up"]), size(both["down"])]
        for site, phases in history.traffic().items()
        for phase, both in phases.items()
    ]
    if not rows:
        return ""
    total = ["all", "", size(history.wire_bytes("up")), size(history.wire_bytes("down"))]
    head = ["Site", "Phase", "Received", "Sent"]
    return details(
        "Bytes on the wire", table("Whole messages, as Flower moves them", head, [*rows, total], [2, 3])
    )


def time_section(history: History) -> str:
    """Where a round's time goes: means over the sites that answered."""
    rows = [r for r in _closed(history) if r.time_split()]
    splits = [r.time_split() for r in rows]
    layers = [Layer(p, f"c-{p}", [s.get(p, 0.0) for s in splits]) for p in PHASES]
    means = ", ".join(
        f"{p} {duration(sum(s.get(p, 0.0) for s in splits) / len(splits))}" for p in PHASES if splits
    )
    chart = stacked_bars(
        "chart-time",
        "Time by round",
        f"Mean seconds a round: {means}.",
        [r.round for r in rows],
        layers,
        y_format=lambda y: f"{y:g} s" if y < 120 else duration(y),
    )
    header = ["Round", *(p.capitalize() for p in PHASES), "Total"]
    values = [
        [str(r.round), *(duration(s.get(p)) for p in PHASES), duration(r.total_seconds)]
        for r, s in zip(rows, splits)
    ]
    note = (
        "Means over the sites that answered. Wait is the rest of the round: transfer, waiting for slower "
        "sites, and the server's own work."
    )
    return section(
        "time",
        "Time",
        paragraph(note, "muted") if chart else "",
        _grouped(rows) if chart else "",
        figure(chart, [(layer.label, layer.css) for layer in layers]),
        details("Time values", table("Seconds by round", header, values, range(7))),
    )


def participation_section(history: History) -> str:
    """Sites x rounds: who was asked, and what became of it."""
    rounds, names = history.rounds, sorted(history.sites)
    grid = [("(round)", [_OUTCOME_STATE.get(r.outcome, "unused") for r in rounds])]
    grid += [(name, [r.participation(name) for r in rounds]) for name in names]
    seen = {state for _, states in grid for state in states}
    chart = cell_map(
        "chart-sites",
        "Participation, sites by rounds",
        "One row a site, one column an attempt at a round; the first row is the outcome of the round. "
        "The tables of sites, rounds and refusals hold the same facts.",
        [r.round for r in rounds],
        grid if names else [],
        {state: glyph for state, glyph, _ in STATES},
    )
    note = "The first row is the round itself: accepted means committed, (?) skipped, (×) aborted."
    entries = [(label, f"s-{state}") for state, _, label in STATES if state in seen]
    return section(
        "sites-map", "Participation", paragraph(note, "muted") if chart else "", figure(chart, entries)
    )


def _closed(history: History) -> list[RoundRow]:
    return [row for row in history.rounds if not row.open]


def _grouped(rows: list[RoundRow]) -> str:
    per = group_size(len(rows))
    return paragraph(f"Each bar is the mean of {per} rounds.", "muted") if per > 1 else ""
