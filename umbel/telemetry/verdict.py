"""What a run brought, in words: the same sentences in the report, in `show` and in `watch`."""

from __future__ import annotations

from umbel.telemetry.history import History
from umbel.telemetry.units import loss

# The mean of products is served in float32: its rounding stays well below this.
EXACT = 1e-5


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
    """The exactness line: the distance of the served adapter from the mean of the sites' products.

    Below EXACT it is rounding; above, the method serves something else than that mean, and the line says so.
    """
    exact = history.exactness()
    if exact is None:
        return ""
    worst, row, checked = exact
    where = f"round {row.round}, {row.exactness_layer}" if row.exactness_layer else f"round {row.round}"
    rounds = f"{checked} of {len(history.committed)} committed rounds checked"
    if worst <= EXACT:
        said = (
            "the served adapter is the weighted mean of the sites' products, up to rounding: relative error"
        )
        return f"Exactness certificate: {said} at most {worst:.1e} ({where}; {rounds})."
    said = f"the served adapter differs from the weighted mean of the sites' products by up to {worst:.2%}"
    return f"Exactness certificate: not exact; {said} of its norm in a round ({where}; {rounds})."
