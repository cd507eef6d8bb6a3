"""Learning rate as a function of the global step.

    warm-up   lr(g) = peak * (g + 1) / warmup                                   for g < warmup
    cosine    lr(g) = peak * (f + (1 - f) * (1 + cos(pi * x)) / 2),  x = (g - warmup) / (total - warmup)
    linear    lr(g) = peak * (1 - (1 - f) * x)

g counts optimiser steps of the run, (commits so far) * local steps + step, not those of one site: a site that
skipped rounds, or joins late, trains at the run's position, and warm-up happens once. f = min_lr_fraction.
"""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, peak: float, total_steps: int, warmup_steps: int, kind: str, min_lr_fraction: float
) -> float:
    """Return the learning rate of global step `step` (from 0)."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if kind == "constant":
        return peak
    span = max(1, total_steps - warmup_steps)
    x = min(1.0, (step - warmup_steps) / span)
    if kind == "linear":
        return peak * (1.0 - (1.0 - min_lr_fraction) * x)
    return peak * (min_lr_fraction + (1.0 - min_lr_fraction) * 0.5 * (1.0 + math.cos(math.pi * x)))
