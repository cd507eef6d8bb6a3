"""What a run brought, in words: the same sentences in the report, in `show` and in `watch`."""

from __future__ import annotations

from umbel.telemetry.history import History
from umbel.telemetry.units import loss


def verdict(history: History) -> str:
    """What the run brought, in one or two sentences."""
    if not history.committed:
        lead = "No round was committed" if history.finished else "No round has been committed yet"
        return f"{lead}: there is no trained model." if history.finished else f"{lead}."
    first, last = history.first_last_heldout()
    contributed = len(history.contributions())
    rounds = f"{len(history.committed)} committed round{'s' if len(history.committed) != 1 else ''}"
    sites = f"{contributed} of {len(history.sites)} sites contributed."
    if first is None or last is None or first <= 0:
        return f"{rounds}; the held-out loss was not measured twice. {sites}"
    verb = "fell" if last < first else "rose" if last > first else "stayed"
    change = f"from {loss(first)} to {loss(last)} ({last / first - 1:+.1%})"
    return f"Held-out loss {verb} {change} in {rounds}. {sites}"


def certificate(history: History) -> str:
    """The exactness line: how far the served aggregate is from the exact one."""
    exact = history.exactness()
    if exact is None:
        return ""
    worst, row, checked = exact
    where = f" in {row.exactness_layer}" if row.exactness_layer else ""
    error = f"a relative error of {worst:.1e} (worst: round {row.round}{where})"
    return (
        "Exactness certificate: the served aggregate equals the weighted mean of the accepted updates within "
        f"{error}; {checked} of {len(history.committed)} committed rounds checked."
    )
