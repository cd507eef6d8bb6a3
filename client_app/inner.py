"""The inner optimiser of a pretraining site: AdamW, Muon with AdamW, or 8-bit AdamW, behind one set of calls.

    muon     hidden matrices by torch.optim.Muon (Jordan et al. 2024; MuLoCo: Therien et al. 2025, arXiv 2505.23725),
             embeddings, output head, norms and biases by AdamW
    rate     one schedule for both: Muon's update is scaled to the root mean square of AdamW's (`match_rms_adamw`)

What is kept between rounds is every slot of every parameter, `<parameter>/<slot>`, float32. 8-bit moments are not
kept: their codes and scales have no form of ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from umbel.config.schema import Train
from umbel.errors import Refusal, RefusalKind
from umbel.local_step import make_optimizer

MUON_MOMENTUM = 0.95


class Inner:
    """The optimisers over `named` parameters; `step(rate)` moves all of them."""

    def __init__(self, model: Any, named: dict[str, Any], train: Train) -> None:
        self.named = named
        self.parameters = list(named.values())
        matrices = hidden_matrices(model, named) if train.optimizer == "muon" else []
        chosen = {id(p) for p in matrices}
        rest = [p for p in self.parameters if id(p) not in chosen]
        self.optimizers: list[Any] = []
        if matrices:
            self.optimizers.append(_muon(matrices, train))
        if rest:
            make = _adamw8bit if train.optimizer == "adamw8bit" else make_optimizer
            self.optimizers.append(make(rest, train))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self, rate: float) -> None:
        """Move all parameters with learning rate `rate`."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def save(self) -> dict[str, np.ndarray]:
        """Return every slot as a float32 array."""
        out: dict[str, np.ndarray] = {}
        for optimizer in self.optimizers:
            for name, parameter in self.named.items():
                for slot, value in optimizer.state.get(parameter, {}).items():
                    out[f"{name}/{slot}"] = value.detach().float().cpu().numpy().copy()
        return out

    def restore(self, slots: dict[str, np.ndarray]) -> None:
        """Put saved slots back; a parameter whose slots are not all there, or of another size, starts anew."""
        for optimizer in self.optimizers:
            wanted = ("momentum_buffer",) if _is_muon(optimizer) else ("step", "exp_avg", "exp_avg_sq")
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in self.named.items():
                if id(parameter) in mine:
                    state = _state(parameter, {s: slots.get(f"{name}/{s}") for s in wanted})
                    if state:
                        optimizer.state[parameter] = state


def hidden_matrices(model: Any, named: dict[str, Any]) -> list[Any]:
    """Return the 2-D weights that are neither an embedding nor the output head, in order."""
    import torch

    outside = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        outside.add(id(head.weight))
    return [p for p in named.values() if p.ndim == 2 and id(p) not in outside]


def _muon(matrices: list[Any], train: Train) -> Any:
    import torch

    return torch.optim.Muon(
        matrices,
        lr=train.learning_rate,
        weight_decay=train.weight_decay,
        momentum=MUON_MOMENTUM,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )


def _is_muon(optimizer: Any) -> bool:
    import torch

    return isinstance(optimizer, torch.optim.Muon)


def _adamw8bit(parameters: list[Any], train: Train) -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except (
        Exception
    ) as error:  # a missing package and a missing CUDA library look different and mean the same
        raise Refusal(
            RefusalKind.REFUSED,
            f"train.optimizer = 'adamw8bit' needs bitsandbytes at this site ({type(error).__name__}). "
            "Install it, or use 'adamw'",
        ) from None
    return AdamW8bit(
        parameters,
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
    )


def _state(parameter: Any, slots: dict[str, np.ndarray | None]) -> dict[str, Any]:
    import torch

    state: dict[str, Any] = {}
    for slot, value in slots.items():
        if value is None or (slot != "step" and value.size != parameter.numel()):
            return {}
        tensor = torch.from_numpy(value.copy())
        state[slot] = (
            tensor if slot == "step" else tensor.to(parameter.device, parameter.dtype).view_as(parameter)
        )
    return state
