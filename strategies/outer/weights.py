"""How much a site's update counts.

uniform       1
tokens        tokens_i                            default for unequal work
token-rate    tokens_i^2 / steps_i                tokens times tokens a step (arXiv 2604.21428)
stale         w / (1 + lambda s), s <= s_max      s = commits since the site's base
"""

from __future__ import annotations


def weight_of(choice: str, tokens: float, steps: int) -> float:
    """Return the unnormalised weight of an update for a choice of `clients.weighting`."""
    if choice == "uniform":
        return 1.0
    if choice == "token-rate":
        return tokens * tokens / max(1, steps)
    return tokens


def stale_factor(staleness: int, decay: float, limit: int) -> float:
    """Return 1 / (1 + decay * staleness), 0.0 beyond the limit."""
    return 1.0 / (1.0 + decay * staleness) if staleness <= limit else 0.0
