"""The summed next-token loss of hidden states, for the part of a split model that owns the LM head.

    per block of m token rows    l = z_b W^T;   loss += sum logsumexp(l) - l[y];   dz_b = (softmax(l) - onehot(y)) W

so that the logits of a large vocabulary exist m rows at a time, forward and backward, instead of B T rows. W is frozen:
its gradient is not computed. Up to m rows, or where a second derivative is wanted, the plain loss is taken.
"""

from __future__ import annotations

from typing import Any

IGNORE = -100


def hidden_loss(output: Any, hidden: Any, labels: Any, block: int = 0) -> Any:
    """Return the sum of -log p(labels[t + 1] | hidden[t]) over supervised tokens, float32.

    `hidden` [B, T, d], `labels` int64 [B, T] unshifted with -100; logits are built at supervised positions only, `block`
    rows at once (0: all).
    """
    import torch.nn.functional as F

    wanted = labels[:, 1:]
    keep = wanted != IGNORE
    rows, targets = hidden[:, :-1][keep], wanted[keep]
    if block and len(targets) > block and _is_plain(output):
        return blocked_loss(rows, output.weight, targets, block)
    return F.cross_entropy(output(rows).float(), targets, reduction="sum")


def _is_plain(output: Any) -> bool:
    """Tell whether the LM head is one frozen matrix."""
    import torch

    return type(output) is torch.nn.Linear and output.bias is None and not output.weight.requires_grad


def blocked_loss(rows: Any, weight: Any, targets: Any, block: int) -> Any:
    """Return the summed loss of rows [n, d] against targets [n] with logits of `block` rows at a time."""
    import torch

    class Blocked(torch.autograd.Function):
        """Keeps dz [n, d] instead of logits [n, V]."""

        @staticmethod
        def forward(ctx: Any, z: Any) -> Any:
            loss, gradient = torch.zeros((), device=z.device), torch.empty_like(z)
            for at in range(0, len(z), block):
                part, wanted = z[at : at + block], targets[at : at + block, None]
                logits = (part @ weight.T).float()
                total = torch.logsumexp(logits, -1, keepdim=True)
                loss += (total - logits.gather(1, wanted)).sum()
                chance = torch.exp_(logits - total)
                chance.scatter_add_(1, wanted, torch.full_like(total, -1.0))
                gradient[at : at + block] = chance.to(weight.dtype) @ weight
            ctx.save_for_backward(gradient)
            return loss

        @staticmethod
        def backward(ctx: Any, up: Any) -> Any:
            return up * ctx.saved_tensors[0]

    return Blocked.apply(rows)
