"""The summed next-token loss of hidden states, for the part of a split model that owns the LM head."""

from __future__ import annotations

from typing import Any

IGNORE = -100


def hidden_loss(output: Any, hidden: Any, labels: Any) -> Any:
    """Return the sum of -log p(labels[t + 1] | hidden[t]) over supervised tokens, float32.

    `hidden` [B, T, d], `labels` int64 [B, T] unshifted with -100; logits are built at supervised positions only.
    """
    import torch.nn.functional as F

    wanted = labels[:, 1:]
    keep = wanted != IGNORE
    logits = output(hidden[:, :-1][keep]).float()
    return F.cross_entropy(logits, wanted[keep], reduction="sum")
