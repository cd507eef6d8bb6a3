"""The waits of a run lie inside one another, or a round hangs on the wrong one.

    poll < travel < deadline < message lifetime           (and grace <= deadline, adaptive minimum > travel)

`poll` is how often replies are looked for, `travel` what a reply needs after the site has stopped working, the
lifetime what the SuperLink keeps a message for. Checked when a run starts; a violation names both and their values.
"""

from __future__ import annotations

import itertools

from umbel.config import Config
from umbel.errors import ConfigError

# The site stops this long before the server does, on top of its own margin: polls and the upload take time.
TRAVEL_SECONDS = 5.0
# A message outlives its round by this: then the SuperLink itself drops what nobody can use.
TTL_MARGIN_SECONDS = 60.0


def ladder(config: Config, poll_seconds: float) -> list[tuple[str, float]]:
    """Return (name, seconds) of the nested waits, innermost first."""
    c = config.clients
    shortest = [("clients.min-deadline-seconds", c.min_deadline_seconds)] if c.adaptive_deadline else []
    return [
        ("the polling interval", poll_seconds),
        ("the time a reply travels", TRAVEL_SECONDS),
        *shortest,
        ("clients.deadline-seconds", c.deadline_seconds),
        ("a message's lifetime", c.deadline_seconds + TTL_MARGIN_SECONDS),
    ]


def check_nesting(config: Config, poll_seconds: float) -> None:
    """Raise ConfigError naming the first pair of waits that does not nest."""
    rungs = ladder(config, poll_seconds)
    for (inner, short), (outer, long) in itertools.pairwise(rungs):
        # An adaptive minimum equal to the deadline is a fixed deadline, and fine.
        if short > long or (short == long and not inner.startswith("clients.")):
            key, other = (outer, inner) if outer.startswith("clients.") else (inner, outer)
            value, bound = (long, short) if outer.startswith("clients.") else (short, long)
            raise ConfigError(
                key,
                f"does not nest with {other} ({bound:g} s): the inner wait must be the shorter one",
                got=value,
                allowed=f"more than {short:g} s" if key == outer else f"less than {long:g} s",
                remedy="A round that ends before its replies can travel never commits.",
            )
