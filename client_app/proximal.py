"""FedProx on an adapter in the space of its products: the pull does not depend on the basis of the factors.

    P(A, B) = mu/2 s^2 |B A - B_g A_g|_F^2            (Li et al. 2020, arXiv 1812.06127, on what the layer computes)

    dP/dB = mu s^2 (B (A A^T) - B_g (A_g A^T))        dP/dA = mu s^2 ((B^T B) A - (B^T B_g) A_g)

(A, B) and (R^-1 A, B R) are one update, and |A - A_g|^2 + |B - B_g|^2 differs between them; P does not. Only r x r
products and the factors themselves are formed. As in `sft.pull_back` the step follows the optimiser's, decoupled from
its preconditioner: theta <- theta - amount dP/dtheta / mu with amount = learning rate x mu, at most 1 / L a layer with
L = s^2 max(|A A^T|_F, |B^T B|_F), beyond which the step could overshoot along one factor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from umbel.models.names import ADAPTER


class Anchor(NamedTuple):
    """One adapted layer: its live factors, those of the round's start, and s."""

    a: Any
    b: Any
    a_start: Any
    b_start: Any
    scale: float


def anchors_of(model: Any) -> list[Anchor]:
    """Return the adapted layers of a model with an adapter, A [r, in] and B [out, r] as they are now."""
    found = []
    for module in model.modules():
        if ADAPTER in getattr(module, "lora_A", ()):
            a, b = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
            found.append(Anchor(a, b, a.detach().clone(), b.detach().clone(), float(module.scaling[ADAPTER])))
    return found


def pull_back_products(anchors: list[Anchor], amount: float) -> None:
    """Take one step of the pull on every layer, in place; a factor that is frozen in this round stays."""
    import torch

    with torch.no_grad():
        for a, b, a_start, b_start, scale in anchors:
            rows, columns = a @ a.T, b.T @ b
            limit = scale**2 * max(float(rows.norm()), float(columns.norm()))
            step = scale**2 * (min(amount, 1 / limit) if limit > 0 else amount)
            move_b = b @ rows - b_start @ (a_start @ a.T)
            move_a = columns @ a - (b.T @ b_start) @ a_start
            if b.requires_grad:
                b.sub_(step * move_b)
            if a.requires_grad:
                a.sub_(step * move_a)
