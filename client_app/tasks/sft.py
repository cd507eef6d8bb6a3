"""Supervised fine-tuning between two rounds: AdamW over the site's own rows.

One optimiser step takes `batch_size * accumulation` rows from the data cursor. Its gradient is that of

    loss = sum of token losses / number of supervised tokens in the step

whatever the number of micro-batches, because every part is divided by the tokens of the whole step. Between two
steps the deadline is looked at; when it has passed, the result is partial and says how many tokens it stands for.
Dropout is seeded by (run seed, round, site), data order by (run seed, site, epoch): never by what ran before.

The update is the trained state itself (`payload = value`): with an exact codec the server then gets the very bits
the site holds. What is *not* done here: validation of the result against other sites, aggregation, transport.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from client_app import ranks
from client_app.batches import batches, sequences, wide_for
from client_app.clock import Clock
from client_app.precision import autocast
from client_app.proximal import anchors_of, pull_back_products
from client_app.schedule import learning_rate
from umbel.config.schema import Config
from umbel.data.cursor import Cursor, take
from umbel.errors import Refusal, RefusalKind
from umbel.models.loss import batch_loss
from umbel.models.state import named_trainable, read_state
from umbel.seeds import derive_seed


@dataclass
class TrainResult:
    """Trained tensors and what they cost; `moments` are AdamW's, empty when they are not kept."""

    arrays: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    cursor: Cursor
    tokens: int
    steps: int
    loss: float
    partial: bool


def train(
    model: Any,
    rows: list[Any],
    config: Config,
    clock: Clock,
    *,
    site: str,
    round_index: int,
    first_step: int,
    total_steps: int,
    cursor: Cursor,
    moments: dict[str, np.ndarray],
    precision: str,
    max_tokens: int,
    packing: bool,
    local_steps: int,
    factor: str = "",
) -> TrainResult:
    """Train `model` in place for `local_steps` steps or until the deadline and return the result.

    `first_step` is the global step of the first local one. `factor` names what is trained of an adapter
    (`umbel.models.state.named_trainable`); kept moments of what is not trained in this round stay untouched.
    Raises Refusal: NON_FINITE when a loss or gradient is not finite, DEADLINE when not even one step was possible.
    """
    import torch

    settings = config.train
    named = named_trainable(model, settings.mode, factor)
    parameters = list(named.values())
    optimizer = make_optimizer(parameters, config)
    restore_moments(optimizer, named, moments)
    products = settings.proximal_space == "product"
    pulled = settings.proximal_mu > 0
    anchors = [p.detach().clone() for p in parameters] if pulled and not products else []
    layers = anchors_of(model) if pulled and products else []
    model.train()
    torch.manual_seed(derive_seed(config.run.seed, "dropout", site, round_index))
    loss_sum, tokens, steps = 0.0, 0, 0
    while steps < local_steps and not ranks.anywhere(clock.expired):
        picked, cursor = take(
            cursor, len(rows), settings.batch_size * settings.accumulation, seed=config.run.seed, site=site
        )
        rate = learning_rate(
            first_step + steps,
            peak=settings.learning_rate,
            total_steps=total_steps,
            warmup_steps=settings.warmup_steps,
            kind=settings.schedule,
            min_lr_fraction=settings.min_lr_fraction,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        step_loss, step_tokens = one_step(
            model,
            [rows[i] for i in picked],
            optimizer,
            parameters,
            config,
            precision=precision,
            max_tokens=max_tokens,
            packing=packing,
        )
        if not math.isfinite(step_loss):
            raise Refusal(
                RefusalKind.NON_FINITE, f"the local loss became {step_loss} in step {steps + 1} of the round"
            )
        pull_back(parameters, anchors, rate * settings.proximal_mu)
        pull_back_products(layers, rate * settings.proximal_mu)
        loss_sum += step_loss
        tokens += step_tokens
        steps += 1
        clock.note(steps, tokens)
    model.eval()
    if steps == 0:
        raise Refusal(RefusalKind.DEADLINE, "no step could be finished before the deadline")
    arrays = read_state(model, settings.mode)
    refuse_non_finite(arrays)
    kept = {**moments, **save_moments(optimizer, named)} if settings.optimizer_state == "keep" else {}
    return TrainResult(arrays, kept, cursor, tokens, steps, loss_sum / max(1, tokens), steps < local_steps)


def one_step(
    model: Any,
    rows: list[Any],
    optimizer: Any,
    parameters: list[Any],
    config: Config,
    *,
    precision: str,
    max_tokens: int,
    packing: bool,
) -> tuple[float, int]:
    """Do one optimiser step over `rows` and return (summed loss, supervised tokens)."""
    import torch

    size = config.train.batch_size
    micro = [rows[i : i + size] for i in range(0, len(rows), size)]
    wide = wide_for(model)
    parts = [s for m in micro for s in sequences(m, max_tokens=max_tokens, packing=packing, wide=wide)]
    tokens = sum(len(s.targets) for s in parts)
    if tokens == 0:
        return 0.0, 0
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for s in batches(ranks.share(parts), max_tokens=max_tokens, wide=wide):
        with autocast(model, precision):
            out = batch_loss(model, *s)
        (out.loss / tokens).backward()
        total += float(out.loss.detach())
    total = ranks.total(total)
    ranks.sum_gradients(parameters)
    if not math.isfinite(total):
        return total, tokens
    if config.train.clip_norm > 0:
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.train.clip_norm)
        if not torch.isfinite(norm):
            raise Refusal(RefusalKind.NON_FINITE, "the gradient is not finite")
    optimizer.step()
    return total, tokens


def make_optimizer(parameters: list[Any], config: Config) -> Any:
    """Return AdamW; weight decay applies to matrices only, not to norms and biases."""
    from umbel.local_step import make_optimizer as make

    return make(parameters, config.train)


def pull_back(parameters: list[Any], anchors: list[Any], amount: float) -> None:
    """Move parameters towards the round's start: p <- p - amount (p - anchor), amount = learning rate x mu.

    FedProx (Li et al. 2020, arXiv 1812.06127) decoupled from the optimiser: as a gradient penalty, AdamW's
    preconditioner would rescale it coordinate by coordinate. No anchors: nothing happens.
    """
    import torch

    if anchors:
        with torch.no_grad():
            torch._foreach_lerp_(parameters, anchors, min(1.0, amount))


def save_moments(optimizer: Any, named: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return AdamW's state as float32 arrays, `<parameter>/<slot>`."""
    out: dict[str, np.ndarray] = {}
    for key, parameter in named.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            out[f"{key}/{slot}"] = value.detach().cpu().float().numpy().copy()
    return out


def restore_moments(optimizer: Any, named: dict[str, Any], moments: dict[str, np.ndarray]) -> None:
    """Put saved moments back; those of a parameter that changed its shape are ignored."""
    import torch

    for key, parameter in named.items():
        state = {}
        for slot in ("step", "exp_avg", "exp_avg_sq"):
            value = moments.get(f"{key}/{slot}")
            if value is None or (slot != "step" and value.size != parameter.numel()):
                continue
            tensor = torch.from_numpy(value.copy())
            state[slot] = (
                tensor if slot == "step" else tensor.to(parameter.device, parameter.dtype).view_as(parameter)
            )
        if len(state) == 3:
            optimizer.state[parameter] = state


def refuse_non_finite(arrays: dict[str, np.ndarray]) -> None:
    """Raise Refusal(NON_FINITE) naming the first tensor that holds NaN or Inf."""
    for name, array in arrays.items():
        floating = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
        if floating and not np.isfinite(array.astype(np.float32, copy=False)).all():
            raise Refusal(RefusalKind.NON_FINITE, f"tensor {name} is not finite after training")
