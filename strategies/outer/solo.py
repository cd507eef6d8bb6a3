"""A round in which one site of many delivered: its progress is not damped.

    whole     theta <- theta + delta            momentum is left as it was
    damped    the outer step as in any other round

With outer rate 0.7 a damped solo round throws 30 % of the only progress away, and with Nesterov momentum mu it moves
by lr (1 + mu) delta from rest; neither is the site's model. The rule is for degraded rounds of a run of several
sites. A run *designed* for one site (SNOO, arXiv 2510.15830) keeps its tuned outer step in every round.
"""

from __future__ import annotations

CHOICES = ("whole", "damped")


def is_degraded(choice: str, num_asked: int, num_contributors: int) -> bool:
    """Tell whether this round takes the lone site's values as they are."""
    return choice == "whole" and num_contributors == 1 and num_asked > 1
