"""What is trained, exchanged and checkpointed: named arrays, bit for bit.

`lora`: the adapter (factors, magnitudes, saved modules). `full`: every parameter once, a tied matrix under
the first of its names, then the persistent buffers under `buffer:`. Arrays have the tensor's own dtype;
bfloat16 is `ml_dtypes.bfloat16`, two bytes an element. Writing wants exactly the same names, shapes and
dtypes: a library that ignores names it does not know trains a fresh adapter without a word.

Frames, deltas and aggregation are elsewhere; nothing here knows about rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from umbel.models.names import BUFFER, canonical, role_of
from umbel.models.problem import first_three, model_error

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "MODES",
    "is_tied",
    "named_trainable",
    "read_state",
    "role_of",
    "state_tensors",
    "trainable_parameters",
    "write_state",
]

MODES = ("lora", "full")
FACTORS = ("", "A", "B", "core")
CORES = (".lora_B.core", ".lora_B.gain")


def read_state(model: nn.Module, mode: str) -> dict[str, np.ndarray]:
    """Return copies of the exchanged tensors by canonical name, in model order, on the CPU.

    Raises ModelError for a tensor without data (meta device), of 8-bit float or complex type, or packed.
    """
    return {name: to_numpy(name, tensor) for name, tensor in state_tensors(model, mode).items()}


def write_state(model: nn.Module, arrays: Mapping[str, np.ndarray], mode: str) -> None:
    """Copy `arrays` into the model; names, shapes and dtypes must be exactly those of `read_state`.

    Everything is compared before anything is written, so an error leaves the model as it was.
    """
    import torch

    tensors = state_tensors(model, mode)
    compare_names(tensors, arrays)
    for name, tensor in tensors.items():
        _compare_form(name, tensor, arrays[name])
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(to_torch(arrays[name]))


def trainable_parameters(model: nn.Module, mode: str, factor: str = "") -> list[nn.Parameter]:
    """Mark exactly the trained parameters as requiring a gradient and return them in canonical order.

    `factor` "A" or "B" keeps the other factor frozen (alternating and frozen-A methods), "core" trains the cores
    between two frozen factors; it is applied to the attached adapter, so a frozen factor really stays what the
    server sent.
    """
    return list(named_trainable(model, mode, factor).values())


def named_trainable(model: nn.Module, mode: str, factor: str = "") -> dict[str, nn.Parameter]:
    """As `trainable_parameters`, by canonical name."""
    import torch

    if factor not in FACTORS:
        raise model_error(
            "factor is unknown", got=factor, allowed="'', 'A', 'B', 'core'", remedy="Leave it empty for both."
        )
    frozen = {"A": "lora_B", "B": "lora_A"}.get(factor, "")
    chosen = {
        name: tensor
        for name, tensor in state_tensors(model, mode).items()
        if isinstance(tensor, torch.nn.Parameter)
        and tensor.is_floating_point()
        and role_of(name) != frozen
        # The gain of a single core is one factor too many.
        and (factor != "core" or (name.endswith(CORES) and tensor.shape[0] > (1 if tensor.ndim == 1 else 0)))
    }
    model.requires_grad_(False)
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    return chosen


def state_tensors(model: nn.Module, mode: str) -> dict[str, torch.Tensor]:
    """Return the live tensors of the exchange by canonical name; a shared storage appears once."""
    wrapped = hasattr(model, "peft_config")
    if mode not in MODES or wrapped != (mode == "lora"):
        raise model_error(
            "exchange mode does not fit the model",
            got=f"mode {mode!r} on {type(model).__name__}",
            allowed="'lora' on a model with an adapter, 'full' on one without",
            remedy="Call attach() first for 'lora'; pass the bare model for 'full'.",
        )
    return _adapter_tensors(model) if wrapped else _all_tensors(model)


def is_tied(model: Any) -> bool:
    """Return whether the output head is the input embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and _identity(head.weight) == _identity(embedding.weight)


def to_numpy(name: str, tensor: torch.Tensor) -> np.ndarray:
    """Return a copy as a numpy array of the same bits; 0-d and empty shapes are kept."""
    import ml_dtypes
    import torch

    plain = tensor.is_floating_point() and tensor.element_size() >= 2
    whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.element_size() <= 8
    is_code = isinstance(tensor, torch.nn.Parameter) and not tensor.is_floating_point()
    if tensor.is_meta or not (plain or whole) or is_code:
        raise model_error(
            f"tensor {name!r} cannot be exchanged",
            got="meta device, no data" if tensor.is_meta else str(tensor.dtype),
            allowed="float64, float32, float16, bfloat16; whole numbers and booleans for buffers",
            remedy="Load real, unquantised weights; 8-bit floats and packed codes have no common arithmetic.",
        )
    host = tensor.detach().to("cpu", copy=True).contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    """Return a CPU tensor of the same bits that shares no memory with `array`."""
    import ml_dtypes
    import torch

    own = np.array(array, order="C", copy=True)
    if own.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy type of a PyTorch type's name."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = ((canonical(key), parameter) for key, parameter in model.named_parameters())
    return {name: parameter for name, parameter in named if name is not None}


def _all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    persistent = model.state_dict(keep_vars=True)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[Any] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if _identity(parameter) not in seen:
            seen.add(_identity(parameter))
            tensors[name] = parameter
    for name, buffer in model.named_buffers():
        if name in persistent and _identity(buffer) not in seen:
            seen.add(_identity(buffer))
            tensors[BUFFER + name] = buffer
    return tensors


def _identity(tensor: torch.Tensor) -> Any:
    """Return what two names of one matrix have in common; without data it is the object itself."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def compare_names(tensors: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    missing = [name for name in tensors if name not in arrays]
    unexpected = [name for name in arrays if name not in tensors]
    if missing or unexpected:
        raise model_error(
            f"state does not fit the model: {len(missing)} names missing, {len(unexpected)} unexpected",
            got=f"missing {first_three(missing) or 'none'}; unexpected {first_three(unexpected) or 'none'}",
            allowed=f"exactly the {len(tensors)} names of this model, without wrapper prefix or adapter name",
            remedy="Both sides must use the same base, target modules and mode: compare the fingerprints.",
        )


def _compare_form(name: str, tensor: torch.Tensor, array: np.ndarray) -> None:
    wanted = tuple(tensor.shape), numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    if (array.shape, array.dtype) != wanted:
        raise model_error(
            f"array {name!r} does not fit the model",
            got=f"{array.shape} {array.dtype}",
            allowed=f"{wanted[0]} {wanted[1]}",
            remedy="Rank, base model and dtype come from the server's settings: use those.",
        )
