"""Next-token loss over whole blocks, as sums.

    loss = sum over the B x L targets of -log p(x[t+1] | x[..t])

Every position is a target, so the whole logits [B, L, V] are wanted and nothing is picked. Sums, not means: a mean
over several micro-batches is only right when it is taken once, over all of their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from umbel.models.loss import LossSum


def block_loss(model: Any, blocks: np.ndarray, *, count_correct: bool = False) -> LossSum:
    """Return the summed loss of `blocks`, int64 [B, L + 1]: L inputs and L targets a row."""
    import torch
    import torch.nn.functional as F

    ids = torch.from_numpy(np.ascontiguousarray(blocks, dtype=np.int64)).to(next(model.parameters()).device)
    targets = ids[:, 1:].reshape(-1)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    logits = logits.reshape(-1, logits.shape[-1]).float()
    loss = F.cross_entropy(logits, targets, reduction="sum")
    correct = int((logits.argmax(-1) == targets).sum()) if count_correct else 0
    return LossSum(loss, int(targets.numel()), correct)


def score_blocks(
    model: Any, blocks: Any, *, batch_size: int, expired: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Return {loss_sum, tokens, correct} over all `blocks` in eval mode, or None when time ran out before the last.

    A loss that is not finite is returned as NaN.
    """
    import torch

    was_training = model.training
    model.eval()
    loss_sum, tokens, correct = 0.0, 0, 0
    try:
        with torch.no_grad():
            for first in range(0, len(blocks), batch_size):
                if expired():
                    return None
                picked = blocks.stack(range(first, min(first + batch_size, len(blocks))))
                out = block_loss(model, picked, count_correct=True)
                loss_sum += float(out.loss)
                tokens += out.tokens
                correct += out.correct
    finally:
        model.train(was_training)
    return {
        "loss_sum": loss_sum if math.isfinite(loss_sum) else math.nan,
        "tokens": tokens,
        "correct": correct,
    }
