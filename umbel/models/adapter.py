"""LoRA on a frozen base, through PEFT.

Reference: Hu et al., LoRA, arXiv 2106.09685.

    y = W x + s B A x        A (r, in), B (out, r)

Settings and s are in `lora.py`, the choice of layers in `targets.py`. First values come from Philox
under the module's name, so they depend on neither device, dtype nor order, and B = 0 makes the first forward
pass that of the base. Aggregation of adapters is not here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from umbel.models.lora import LoraSettings, names_in, parse_pattern, rank_of, scale_of
from umbel.models.names import ADAPTER, canonical, strip_wrapper
from umbel.models.quantised import plain_kind
from umbel.models.quiet import quiet_notes
from umbel.models.state import numpy_dtype
from umbel.models.targets import check_patterns, check_saved, resolve_targets, short_names
from umbel.seeds import generator

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = [
    "AdaptedModule",
    "LoraSettings",
    "adapted_modules",
    "attach",
    "initial_adapter",
    "rank_of",
    "scale_of",
    "unadapted_matrices",
]


class AdaptedModule(NamedTuple):
    """One adapted layer: canonical name, base class, shape, rank, s, and whether it stores (in, out)."""

    name: str
    kind: str
    in_features: int
    out_features: int
    rank: int
    scale: float
    fan_in_fan_out: bool


def attach(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """Wrap `model` with a trainable adapter named `default`; everything else stays frozen.

    Deterministic: A starts from `initial_adapter` with seed 0 and B from zeros, and the caller's random state
    is left as it was. Raises ModelError when a name matches nothing, even if others match, when a name
    matches a layer that is neither Linear nor Conv1D, when a tied head is targeted, or when a task head would
    stay frozen at values that differ by site.
    """
    import torch
    from peft import get_peft_model

    config = _peft_config(model, settings)
    with quiet_notes(), torch.random.fork_rng(devices=[]):
        peft_model = get_peft_model(model, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)
    _set_dtype_and_start(peft_model, settings)
    for module in adapted_modules(peft_model):
        expected = scale_of(settings, module.name)
        if module.scale != expected:
            raise AssertionError(f"{module.name}: PEFT scales by {module.scale}, the settings by {expected}")
    return peft_model


def adapted_modules(peft_model: PeftModel) -> list[AdaptedModule]:
    """Return the adapted layers in model order, under the names of the model without adapter."""
    return [
        AdaptedModule(
            name=name,
            kind=plain_kind(layer.get_base_layer()),
            in_features=layer.in_features,
            out_features=layer.out_features,
            rank=layer.r[ADAPTER],
            scale=layer.scaling[ADAPTER],
            fan_in_fan_out=bool(layer.fan_in_fan_out),
        )
        for name, layer in _lora_layers(peft_model)
    ]


def unadapted_matrices(peft_model: PeftModel) -> list[str]:
    """Return the weights of two or more dimensions that no adapter covers, for the report before round 1.

    Fused experts of a mixture model are plain parameters, not linear layers: they stay frozen and show up
    here.
    """
    return [
        strip_wrapper(key)
        for key, parameter in peft_model.named_parameters()
        if parameter.ndim >= 2
        and canonical(key) is None
        and not {"base_layer", "original_module"} & set(key.split("."))
    ]


def initial_adapter(modules: list[AdaptedModule], settings: LoraSettings, seed: int) -> dict[str, np.ndarray]:
    """Return the first A and B of every module in `settings.dtype`, a pure function of seed and name.

    A ~ U(-1/sqrt(in), 1/sqrt(in)), which is Kaiming's uniform rule with a = sqrt(5), drawn in float32 and
    then cast; B = 0. Magnitudes of DoRA and saved modules depend on the base: read those from the attached
    model.
    """
    dtype = numpy_dtype(settings.dtype)
    arrays: dict[str, np.ndarray] = {}
    for module in modules:
        stream = generator(seed, "lora_A", module.name)
        unit = stream.random((module.rank, module.in_features), dtype=np.float32)
        bound = np.float32(1.0 / math.sqrt(module.in_features))
        arrays[f"{module.name}.lora_A.weight"] = ((2 * unit - 1) * bound).astype(dtype)
        arrays[f"{module.name}.lora_B.weight"] = np.zeros((module.out_features, module.rank), dtype)
    return arrays


def _peft_config(model: Any, settings: LoraSettings) -> Any:
    from peft import LoraConfig, TaskType

    targets = resolve_targets(model, settings)
    saved = names_in(settings.modules_to_save)
    check_saved(model, saved)
    check_patterns(settings, targets)
    causal = model.get_output_embeddings() is not None
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM if causal else None,
        r=settings.rank,
        lora_alpha=_plain(settings.alpha),
        lora_dropout=settings.dropout,
        target_modules=short_names(model, targets),
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        rank_pattern={
            k: int(v) for k, v in parse_pattern("lora.rank-pattern", settings.rank_pattern).items()
        },
        alpha_pattern={
            k: _plain(v) for k, v in parse_pattern("lora.alpha-pattern", settings.alpha_pattern).items()
        },
        modules_to_save=saved or None,
        fan_in_fan_out=all(type(module).__name__ == "Conv1D" for module in targets.values()),
        bias="none",
    )


def _set_dtype_and_start(peft_model: PeftModel, settings: LoraSettings) -> None:
    import torch

    dtype = getattr(torch, settings.dtype)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    start = initial_adapter(adapted_modules(peft_model), settings, seed=0)
    with torch.no_grad():
        for name, layer in _lora_layers(peft_model):
            if layer.lora_A[ADAPTER].weight.is_meta:
                continue
            first = start[f"{name}.lora_A.weight"].astype(np.float32)
            layer.lora_A[ADAPTER].weight.copy_(torch.from_numpy(first))
            layer.lora_B[ADAPTER].weight.zero_()


def _lora_layers(peft_model: Any) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [
        (strip_wrapper(name), module)
        for name, module in peft_model.named_modules()
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A
    ]


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number
