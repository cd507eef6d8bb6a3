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
    packed: bool = True,
    count_correct: bool = False,
) -> LossSum:
    """Return the summed loss of one packed sequence.

    `input_ids` and `position_ids` are int [T], positions restarting at 0 for each row packed into the sequence;
    `keep` int [K] are the positions whose next token is supervised and `targets` int [K] those tokens.
    """
    import torch
    import torch.nn.functional as F

    device = next(model.parameters()).device
    ids = torch.from_numpy(np.ascontiguousarray(input_ids, dtype=np.int64))[None].to(device)
    kept = torch.from_numpy(np.ascontiguousarray(keep, dtype=np.int64)).to(device)
    wanted = torch.from_numpy(np.ascontiguousarray(targets, dtype=np.int64)).to(device)
    extra: dict[str, Any] = {}
    if packed:
        extra["position_ids"] = torch.from_numpy(np.ascontiguousarray(position_ids, dtype=np.int64))[None].to(
            device
        )
    logits = model(input_ids=ids, logits_to_keep=kept, use_cache=False, **extra).logits[0]
    logits = logits.float()
    loss = F.cross_entropy(logits, wanted, reduction="sum")
    correct = int((logits.argmax(-1) == wanted).sum()) if count_correct else 0
    return LossSum(loss, int(wanted.numel()), correct)
