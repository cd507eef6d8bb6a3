"""Loss of a state on rows that are never trained on, as sums: sites of unequal size are then added exactly."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from client_app.batches import batches, sequences, wide_for
from client_app.clock import Clock
from umbel.models.loss import batch_loss


class HeldoutSums(NamedTuple):
    """Summed token loss (nats), tokens and correctly predicted tokens; all zero when there is nothing to score."""

    loss_sum: float
    tokens: int
    correct: int


def evaluate(
    model: Any,
    rows: list[Any],
    clock: Clock,
    *,
    batch_size: int,
    max_tokens: int,
    packing: bool,
    precision: str,
) -> HeldoutSums | None:
    """Return the sums over `rows`, or None when the deadline passed before the last row: a part is no measure."""
    import torch

    from client_app.precision import autocast

    was_training, wide = model.training, wide_for(model)
    model.eval()
    loss_sum, tokens, correct = 0.0, 0, 0
    try:
        with torch.no_grad(), autocast(model, precision):
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                found = sequences(batch, max_tokens=max_tokens, packing=packing, wide=wide)
                for part in batches(found, max_tokens=max_tokens, wide=wide):
                    if clock.expired:
                        return None
                    out = batch_loss(model, *part, count_correct=True)
                    loss_sum += float(out.loss)
                    tokens += out.tokens
                    correct += out.correct
    finally:
        model.train(was_training)
    return (
        HeldoutSums(loss_sum, tokens, correct)
        if math.isfinite(loss_sum)
        else HeldoutSums(math.nan, tokens, correct)
    )


def evaluate_blocks(
    model: Any, blocks: Any, clock: Clock, *, batch_size: int, precision: str
) -> HeldoutSums | None:
    """As `evaluate`, over the held-out blocks of a tokenised corpus."""
    from client_app.precision import autocast
    from umbel.models.block_loss import score_blocks

    with autocast(model, precision):
        sums = score_blocks(model, blocks, batch_size=batch_size, expired=lambda: clock.expired)
    return None if sums is None else HeldoutSums(**sums)
