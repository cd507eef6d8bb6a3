"""One line a round on the server's console, so that a run is readable in a terminal and in a log file.

    round 3/10  loss 2.314 (-0.120)  sites 3/3  late 0 dropped 0  up 2.1 MB down 2.1 MB  load 1.2s ...  commit

Plain text without colour or control characters; the numbers come from `history`, the words from here.
"""

from __future__ import annotations

from umbel.telemetry.history import History
from umbel.telemetry.records import RoundRow
from umbel.telemetry.units import change, duration, loss, one_line, size

_SHOWN_PHASES = ("load", "train", "eval", "encode", "wait")


def header(history: History) -> str:
    """The first lines of a run: what is trained, how, with whom."""
    sites = history.num_sites_expected or len(history.sites) or "?"
    lines = [f"run {history.run or '?'}: {history.method or '?'}, {history.task or '?'}"]
    lines.append(f"model {history.model or '?'}  rounds {history.num_rounds or '?'}  sites {sites}")
    if history.num_starts > 1:
        lines.append(
            f"resumed: start {history.num_starts}, {len(history.committed)} rounds already committed"
        )
    return "\n".join(one_line(line) for line in lines)


def round_line(row: RoundRow, previous: RoundRow | None = None, num_rounds: int | None = None) -> str:
    """One round on one line; `previous` is the committed round before it, for the change in loss."""
    parts = [f"round {row.round}/{num_rounds}" if num_rounds else f"round {row.round}"]
    if row.attempt > 1:
        parts[0] += f" attempt {row.attempt}"
    delta = change(row.train_loss, previous.train_loss if previous else None)
    parts.append(f"loss {loss(row.train_loss)}" + (f" ({delta})" if delta else ""))
    parts.append(f"sites {len(row.accepted or row.updates)}/{len(row.selected)}")
    parts.append(f"late {row.num_late} dropped {len(row.dropped)}")
    parts.append(f"up {size(row.bytes_up)} down {size(row.bytes_down)}")
    split = row.time_split()
    times = [f"{phase} {duration(split[phase])}" for phase in _SHOWN_PHASES if split.get(phase)]
    if times:
        parts.append(" ".join(times))
    parts.append(row.outcome)
    lost = "; ".join(f"{s}: {row.why(s) or 'no answer'}" for s in row.dropped[:3])
    if lost:
        parts.append(f"[{lost}{' ...' if len(row.dropped) > 3 else ''}]")
    return one_line("  ".join(parts))


def last_round_line(history: History) -> str:
    """`round_line` of the round that was closed last, against the commit before it; '' before any."""
    closed = [row for row in history.rounds if not row.open]
    if not closed:
        return ""
    row = closed[-1]
    before = [r for r in history.committed if r.round < row.round]
    return round_line(row, before[-1] if before else None, history.num_rounds)


def footer(history: History) -> str:
    """The last lines: outcome, what it brought, what it cost, and who contributed."""
    first, last = history.first_last_heldout()
    asked = f"/{history.num_rounds}" if history.num_rounds else ""
    lines = [
        f"{history.outcome}: {len(history.committed)}{asked} rounds in {duration(history.elapsed_seconds())}"
    ]
    if history.reason:
        lines[0] += f" ({history.reason})"
    if first is not None:
        lines.append(f"held-out loss {loss(first)} -> {loss(last)} ({change(last, first) or 'one value'})")
    lines.append(f"up {size(history.bytes_up())}  down {size(history.bytes_down())}")
    if "epsilon" in history.privacy:
        spent = f"epsilon {history.privacy['epsilon']:.3g} at delta {history.privacy.get('delta', 0.0):g}"
        lines.append(f"privacy: {spent} after {len(history.privacy_releases)} releases")
    given = history.contributions()
    for site in sorted(history.sites):
        rounds, tokens = given.get(site, (0, 0))
        lines.append(f"site {site}: {rounds} rounds, {tokens:,} tokens")
    exact = history.exactness()
    if exact is not None:
        worst, row, checked = exact
        lines.append(
            f"exactness: relative error <= {worst:.1e} (round {row.round}; {checked} rounds checked)"
        )
    return "\n".join(one_line(line) for line in lines)
