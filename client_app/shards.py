"""Weights in shards over the ranks (torch FSDP2, `fully_shard`), seen from outside as if they were whole.

    shard(model)        every transformer block and the rest become shards; their gradients are averaged over ranks
    named(model)        trainable parameters by canonical name, tied ones once
    whole(model)        the exchanged arrays, gathered; a collective call

Names are noted before sharding: a shard has no address by which tied matrices could be told. (Zhao et al. 2023,
arXiv 2304.11277; FSDP2 is its per-parameter form.) Gathering needs the whole model in the memory of each rank's host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NAMES = "_umbel_names"


def shard(model: Any) -> None:
    """Shard a loaded model in place over the default process group."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from umbel.models.state import state_tensors

    setattr(model, NAMES, list(state_tensors(model, "full")))
    blocks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    parts = [block for found in blocks[:1] for block in found]
    for part in [*parts, model]:
        fully_shard(part)


def is_sharded(model: Any) -> bool:
    """Return whether `shard` was called on this model."""
    return hasattr(model, NAMES)


def named(model: Any) -> dict[str, Any]:
    """Return the floating parameters by canonical name; all of them require a gradient from now on."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {name: parameters[name] for name in getattr(model, NAMES) if name in parameters}
    for parameter in found.values():
        parameter.requires_grad_(True)
    return found


def whole(model: Any) -> dict[str, np.ndarray]:
    """Return the exchanged arrays of a sharded model, gathered; every rank has to call it."""
    from umbel.models.names import BUFFER
    from umbel.models.state import to_numpy

    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    found = {}
    for name in getattr(model, NAMES):
        tensor = parameters[name].full_tensor() if name in parameters else buffers[name.removeprefix(BUFFER)]
        found[name] = to_numpy(name, tensor.detach())
    return found
