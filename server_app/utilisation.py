"""How much of a round its sites spent training: the number that the number of local steps is chosen by.

    utilisation_i = seconds of local steps at site i / seconds of the round

What is missing to 1 is transfer, waiting for slower sites, evaluation and the server's own work. The seconds of
training are the site's own word.
"""

from __future__ import annotations

from collections.abc import Sequence

from server_app.spool import Entry
from server_app.validate import read_metrics


def utilisation(entries: Sequence[Entry], round_seconds: float) -> dict[str, float]:
    """Return the share by site, in [0, 1]; sites that did not say are left out, and all of them in virtual time."""
    found: dict[str, float] = {}
    for entry in entries:
        seconds = read_metrics(entry.reply).get("seconds")
        train = seconds.get("train") if isinstance(seconds, dict) else None
        if (
            isinstance(train, (int, float))
            and not isinstance(train, bool)
            and train >= 0
            and round_seconds > 0
        ):
            found[entry.reply.site] = min(1.0, float(train) / round_seconds)
    return found
