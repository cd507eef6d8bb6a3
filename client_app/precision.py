"""bf16 autocast where the processor really has it, and nowhere else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def resolve_precision(wanted: str, device: str) -> str:
    """Return 'bf16' or 'float32'; 'auto' takes bf16 on hardware that multiplies in it."""
    import torch

    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "float32"
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return "bf16" if probe is not None and probe() else "float32"


def autocast(model: Any, precision: str) -> AbstractContextManager:
    """Return the context the forward pass runs in; weights and their gradients stay in their own dtype."""
    import torch

    if precision != "bf16":
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)
