"""The leading directions of the base weights' gradient on one step's rows, as factors; nothing is trained.

    G = dL/dW [out, in] of every adapted layer at the received state;   U S V^T = svd(G)
    B = U_r sqrt(S_r / s),  A = sqrt(S_r / s) V_r^T                     s B A is the best rank-r part of G

(Initialisation of Fed-SB, arXiv 2502.15436.) The dense gradient of one layer lives only until it is factored. The
base must be real numbers: a quantised weight has no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from client_app.batches import batches, sequences
from client_app.clock import Clock
from client_app.precision import autocast
from client_app.tasks.sft import TrainResult
from umbel.config.schema import Config
from umbel.data.cursor import Cursor, take
from umbel.errors import Refusal, RefusalKind
from umbel.exchange import A, B
from umbel.models.loss import batch_loss


def low_rank_gradient(
    model: Any,
    rows: list[Any],
    config: Config,
    clock: Clock,
    *,
    site: str,
    cursor: Cursor,
    precision: str,
    max_tokens: int,
    packing: bool,
    **schedule: Any,
) -> TrainResult:
    """Return A and B of every layer, float32 or the adapter's dtype; raises Refusal for a quantised base."""
    from umbel.models.adapter import _lora_layers

    size = config.train.batch_size * config.train.accumulation
    picked, cursor = take(cursor, len(rows), size, seed=config.run.seed, site=site)
    layers = _lora_layers(model)
    model.requires_grad_(False)
    for name, layer in layers:
        weight = layer.get_base_layer().weight
        if not weight.is_floating_point():
            raise Refusal(
                RefusalKind.REFUSED,
                f"the base weight of {name} is quantised and has no gradient; use method ravan",
            )
        weight.requires_grad_(True)
    model.eval()
    found = sequences([rows[i] for i in picked], max_tokens=max_tokens, packing=packing)
    parts = batches(found, max_tokens=max_tokens)
    tokens = sum(len(s.targets) for s in parts)
    loss_sum = 0.0
    try:
        for s in parts:
            with autocast(model, precision):
                out = batch_loss(model, *s)
            (out.loss / max(1, tokens)).backward()
            loss_sum += float(out.loss.detach())
        if not math.isfinite(loss_sum):
            raise Refusal(RefusalKind.NON_FINITE, "the gradient's loss is not finite")
        arrays: dict[str, np.ndarray] = {}
        for name, layer in layers:
            arrays.update(_factors(name, layer))
    finally:
        for _, layer in layers:
            weight = layer.get_base_layer().weight
            weight.grad = None
            weight.requires_grad_(False)
    return TrainResult(arrays, {}, cursor, tokens, 1, loss_sum / max(1, tokens), False)


def _factors(name: str, layer: Any) -> dict[str, np.ndarray]:
    import torch

    from umbel.models.names import ADAPTER
    from umbel.models.state import to_numpy

    base = layer.get_base_layer()
    gradient = base.weight.grad.detach().to(torch.float32)
    if layer.fan_in_fan_out:
        gradient = gradient.T
    base.weight.grad = None
    rank, dtype = layer.r[ADAPTER], layer.lora_A[ADAPTER].weight.dtype
    u, sigma, vt = torch.linalg.svd(gradient, full_matrices=False)
    kept = min(rank, len(sigma))
    root = torch.sqrt(sigma[:kept] / layer.scaling[ADAPTER])
    a = torch.zeros(rank, gradient.shape[1])
    b = torch.zeros(gradient.shape[0], rank)
    a[:kept], b[:, :kept] = (vt[:kept] * root[:, None]).cpu(), (u[:, :kept] * root).cpu()
    return {name + A: to_numpy(name, a.to(dtype)), name + B: to_numpy(name, b.to(dtype))}
