"""One optimiser step of local work, as a site and the server's half of a split model both do it.

    warm-up   lr(g) = peak * (g + 1) / warmup                                   for g < warmup
    cosine    lr(g) = peak * (f + (1 - f) * (1 + cos(pi * x)) / 2),  x = (g - warmup) / (total - warmup)
    linear    lr(g) = peak * (1 - (1 - f) * x)

g counts optimiser steps of the run, (commits so far) * local steps + step, not those of one site: a site that
skipped rounds, or joins late, trains at the run's position, and warm-up happens once. f = min_lr_fraction.
"""

from __future__ import annotations

import math
from typing import Any

from umbel.config.schema import Train


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


def rate_at(train: Train, step: int, total_steps: int) -> float:
    """Return the learning rate of global step `step` under a run's settings."""
    return learning_rate(
        step,
        peak=train.learning_rate,
        total_steps=total_steps,
        warmup_steps=train.warmup_steps,
        kind=train.schedule,
        min_lr_fraction=train.min_lr_fraction,
    )


def make_optimizer(parameters: list[Any], train: Train) -> Any:
    """Return AdamW; weight decay applies to matrices only, not to norms and biases."""
    import torch

    decayed = [p for p in parameters if p.ndim >= 2]
    plain = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=train.learning_rate, betas=(train.beta1, train.beta2)
    )
