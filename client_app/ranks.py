"""Several processes, one step: the sequences of a step are dealt out and their gradients are summed.

    g = sum over ranks of sum over the rank's sequences of d(loss) / T       T = supervised tokens of the whole step

Every rank holds the same weights, takes the same rows from the cursor and divides by the same T, so the step is that
of one process over all micro-batches, up to the order of a sum: `train.accumulation` counts the micro-batches of a
step, however many processes share them. Whether to stop is decided together, or some rank would wait for ever.

Without an initialised process group every function here is the identity and `torch.distributed` is not imported.
What is not done here: starting the processes, sharding weights (FSDP), overlapping communication with computation.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

T = TypeVar("T")


def _group() -> Any:
    """Return `torch.distributed` when a process group of more than one rank is up, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed if distributed.get_world_size() > 1 else None


def share(parts: list[T]) -> list[T]:
    """Return the parts of this rank: each `world size`-th, from the rank's own number on."""
    group = _group()
    return parts[group.get_rank() :: group.get_world_size()] if group else parts


def total(value: float) -> float:
    """Return the sum of `value` over the ranks, in float64."""
    group = _group()
    if group is None:
        return value
    import torch

    tensor = torch.tensor([value], dtype=torch.float64, device=_device(group))
    group.all_reduce(tensor)
    return float(tensor)


def size() -> int:
    """Return the number of ranks."""
    group = _group()
    return group.get_world_size() if group else 1


def most(value: int) -> int:
    """Return the largest `value` of any rank."""
    group = _group()
    if group is None:
        return value
    import torch

    tensor = torch.tensor([value], dtype=torch.int64, device=_device(group))
    group.all_reduce(tensor, op=group.ReduceOp.MAX)
    return int(tensor)


def anywhere(flag: bool) -> bool:
    """Return whether `flag` is true on any rank; every rank gets the same answer."""
    return total(1.0 if flag else 0.0) > 0.0


def sum_gradients(parameters: list[Any]) -> None:
    """Replace each gradient by its sum over the ranks; one exchange a dtype. A rank without work adds zeros."""
    group = _group()
    if group is None:
        return
    import torch

    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for dtype in sorted({p.grad.dtype for p in parameters}, key=str):
        gradients = [p.grad for p in parameters if p.grad.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        group.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _device(group: Any) -> str:
    return "cuda" if group.get_backend() == "nccl" else "cpu"
