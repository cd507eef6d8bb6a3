"""A loaded adapter made to fit one round: its rank, a frozen side adapter, trainable cores. The base stays.

    set_rank    y = W x + s_r B A x            r of the round; s follows from the settings at that rank
    set_carry   y = W x + s B A x + C_B C_A x  C frozen, scale 1, never quantised
    set_cores   y = W x + s B M A x            M = blockdiag(g_1 H_1, .., g_h H_h) trained, A and B frozen

A model is shared by many rounds and sites of one process, so every function also undoes what another round set.
The side adapter is added in a forward hook and the cores replace PEFT's `lora_B`: neither is in PEFT's config, so
saving goes through `umbel.models.combine`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from umbel.exchange import CARRY_A, CARRY_B, CORE, SKETCH_OUT
from umbel.models.adapter import _lora_layers
from umbel.models.lora import LoraSettings, rank_of, scale_of
from umbel.models.names import ADAPTER

_HOOK = "_umbel_carry"


def set_rank(peft_model: Any, settings: LoraSettings, rank: int = 0) -> None:
    """Give every adapted layer the rank of `settings`, or `rank` if it is not 0; new factors are zero."""
    import torch

    wanted = dataclasses.replace(settings, rank=rank) if rank else settings
    for name, layer in _lora_layers(peft_model):
        r = rank_of(wanted, name)
        if layer.r[ADAPTER] == r:
            continue
        old = layer.lora_A[ADAPTER].weight
        like = {"dtype": old.dtype, "device": old.device}
        layer.lora_A[ADAPTER].weight = torch.nn.Parameter(torch.zeros(r, layer.in_features, **like))
        layer.lora_A[ADAPTER].out_features = r
        layer.lora_B[ADAPTER] = _linear(torch.zeros(layer.out_features, r, **like))
        layer.r[ADAPTER] = r
        layer.scaling[ADAPTER] = scale_of(wanted, name)


def set_carry(peft_model: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Add C_B C_A of `arrays` (`m.carry_A`, `m.carry_B`) to the layers; none in `arrays` removes it."""
    import torch

    for name, layer in _lora_layers(peft_model):
        handle = layer.__dict__.pop(_HOOK, None)
        if handle is not None:
            handle.remove()
        if name + CARRY_A not in arrays or arrays[name + CARRY_A].shape[0] == 0:
            continue
        device = layer.lora_A[ADAPTER].weight.device
        a, b = (
            torch.from_numpy(np.array(arrays[name + suffix], np.float32)).to(device)
            for suffix in (CARRY_A, CARRY_B)
        )
        layer.__dict__[_HOOK] = layer.register_forward_hook(_adder(a, b))


def _adder(a: Any, b: Any) -> Any:
    def add(layer: Any, inputs: Any, output: Any) -> Any:
        import torch.nn.functional as F

        if layer.disable_adapters:
            return output
        side = F.linear(F.linear(inputs[0].to(a.dtype), a), b)
        return output + side.to(output.dtype)

    return add


def set_cores(peft_model: Any, heads: int) -> None:
    """Put `heads` trainable cores between B and A of every layer; 0 puts the plain B back."""
    import torch

    core_type = _core_type()
    for _, layer in _lora_layers(peft_model):
        current = layer.lora_B[ADAPTER]
        if heads == (len(current.core) if isinstance(current, core_type) else 0):
            continue
        weight = current.weight.detach()
        layer.lora_B[ADAPTER] = core_type(weight, heads) if heads else _linear(torch.clone(weight))


def _linear(weight: Any) -> Any:
    import torch

    out, inp = weight.shape
    made = torch.nn.Linear(inp, out, bias=False, device="meta")
    made.weight = torch.nn.Parameter(weight)
    return made


def load_adapter(peft_model: Any, state: Mapping[str, np.ndarray], settings: LoraSettings) -> None:
    """Write a method's whole state into the model: factors, cores and side adapter, by their names.

    What no forward pass uses (the basis of a sketch) is left out.
    """
    from umbel.models.state import write_state

    heads = next((len(a) for n, a in state.items() if n.endswith(CORE)), 0)
    set_rank(peft_model, settings)
    set_cores(peft_model, heads)
    set_carry(peft_model, {n: a for n, a in state.items() if n.endswith((CARRY_A, CARRY_B))})
    plain = {n: a for n, a in state.items() if not n.endswith((CARRY_A, CARRY_B, SKETCH_OUT))}
    cores = {n: a for n, a in plain.items() if n.endswith(CORE)}
    gains = {n.removesuffix("core") + "gain": np.ones(len(a), a.dtype) for n, a in cores.items()}
    write_state(peft_model, {**plain, **gains}, "lora")


_CORE: list[Any] = []


def _core_type() -> Any:
    """Return the module class; made once, because PyTorch is imported late."""
    if _CORE:
        return _CORE[0]
    import torch
    import torch.nn.functional as F

    class Cores(torch.nn.Module):
        """x [.., r] -> B blockdiag(g_h H_h) x; `weight` is B."""

        def __init__(self, weight: Any, heads: int) -> None:
            super().__init__()
            size = weight.shape[1] // heads
            like = {"dtype": weight.dtype, "device": weight.device}
            self.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
            self.core = torch.nn.Parameter(torch.zeros(heads, size, size, **like))
            self.gain = torch.nn.Parameter(torch.ones(heads, **like))

        def forward(self, x: Any) -> Any:
            heads, size, _ = self.core.shape
            parts = x.reshape(*x.shape[:-1], heads, size)
            mixed = torch.einsum("...hq,hpq,h->...hp", parts, self.core, self.gain)
            return F.linear(mixed.reshape(x.shape), self.weight)

    _CORE.append(Cores)
    return Cores
