"""Next-token loss at supervised positions only.

    loss = sum over positions t whose next token is supervised of -log p(x[t+1] | x[..t])

The model is asked for logits at those positions alone (`logits_to_keep`), so that the logits of a prompt, or of a
128k vocabulary at every position, are never built. Labels are shifted exactly once, here: the model is never
given any. Sums, not means, are returned: a mean over several batches is only right when it is taken once, over
all of their tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch


class LossSum(NamedTuple):
    """A sum of token losses (a 0-d float32 tensor), its number of tokens and how many argmax got right."""

    loss: torch.Tensor
    tokens: int
    correct: int


def row_loss(
    model: Any,
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    keep: np.ndarray,
    targets: np.ndarray,
    *,
    count_correct: bool = False,
) -> LossSum:
    """Return the summed loss of one packed sequence.

    `input_ids` and `position_ids` are int [T], positions restarting at 0 for each row packed into the sequence;
    `keep` int [K] are the positions whose next token is supervised and `targets` int [K] those tokens.
    """
    rows = np.zeros(len(keep), np.int64)
    return batch_loss(
        model, input_ids[None], position_ids[None], rows, keep, targets, count_correct=count_correct
    )


def batch_loss(
    model: Any,
    input_ids: np.ndarray,
    position_ids: np.ndarray | None,
    rows: np.ndarray,
    keep: np.ndarray,
    targets: np.ndarray,
    *,
    count_correct: bool = False,
) -> LossSum:
    """Return the summed loss of a batch: `input_ids` int [B, T], `position_ids` the same or None for 0..T-1.

    The logits at (rows[i], keep[i]) predict targets[i]; all three are int [K].
    """
    import torch
    import torch.nn.functional as F

    device = next(model.parameters()).device

    def there(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)

    wanted = there(targets)
    extra = {} if position_ids is None else {"position_ids": there(position_ids)}
    logits = kept_logits(model, there(input_ids), there(rows), there(keep), **extra).float()
    loss = F.cross_entropy(logits, wanted, reduction="sum")
    correct = int((logits.argmax(-1) == wanted).sum()) if count_correct else 0
    return LossSum(loss, int(wanted.numel()), correct)


def kept_logits(
    model: Any, ids: torch.Tensor, rows: torch.Tensor, keep: torch.Tensor, **extra: Any
) -> torch.Tensor:
    """Return the logits [K, V] at the positions (rows[i], keep[i]) of ids [B, T], computed nowhere else.

    Transformers' `logits_to_keep` names positions common to all rows. For a batch, the hidden states [B, T, D] are
    picked on their way into the output layer; what a model does to its logits afterwards still happens.
    """
    if len(ids) == 1:
        return model(input_ids=ids, logits_to_keep=keep, use_cache=False, **extra).logits[0]
    head = model.get_output_embeddings()
    if head is None:
        return model(input_ids=ids, use_cache=False, **extra).logits[rows, keep]
    hook = head.register_forward_pre_hook(lambda module, inputs: (inputs[0][rows, keep][None],))
    try:
        return model(input_ids=ids, use_cache=False, **extra).logits[0]
    finally:
        hook.remove()
