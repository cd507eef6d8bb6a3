"""What was trained, on disk: an adapter, a merged model or a full model, readable without Umbel.

A directory appears whole or not at all. Nothing in it names a path of the machine that wrote it, and nothing
asks the network: the adapter's file is written from the exchanged arrays, not by PEFT's saving function,
which may query a model hub and ship embeddings.

Merging adds s B A to the unquantised base in float32 and then casts to `spec.dtype`. A GGUF base is merged
into its dequantised values. An adapter trained beside a quantised base is merged into the full-precision one, and how
far the two are apart is said.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from umbel.models.adapter import LoraSettings, attach
from umbel.models.directory import atomic_directory
from umbel.models.names import WRAPPER
from umbel.models.problem import model_error
from umbel.models.quiet import quiet_notes, quiet_progress
from umbel.models.source import ModelSpec, load_model, load_tokenizer, meta_model
from umbel.models.state import compare_names, state_tensors, to_torch, write_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("umbel.models")

PROBE_TOKENS = 12
MERGE_TOLERANCE = 1e-5


def save_adapter(
    directory: str | Path,
    arrays: Mapping[str, np.ndarray],
    settings: LoraSettings,
    spec: ModelSpec,
    *,
    card: str,
) -> None:
    """Write `adapter_model.safetensors`, `adapter_config.json` and `README.md` (the text of `card`).

    `PeftModel.from_pretrained(base, directory)` reproduces the trained model. `arrays` must be exactly the
    adapter's (ModelError otherwise). The base is named portably: a path only by its last part.
    """
    from safetensors.torch import save_file

    shapes = attach(meta_model(spec), settings)
    tensors = state_tensors(shapes, "lora")
    compare_names(tensors, arrays)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != arrays[name].shape:
            raise model_error(
                f"array {name!r} does not fit the adapter",
                got=arrays[name].shape,
                allowed=str(tuple(tensor.shape)),
                remedy="Export with the settings the adapter was trained with.",
            )
    with atomic_directory(directory) as target:
        weights = {WRAPPER + name: to_torch(arrays[name]) for name in tensors}
        save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
        config = _adapter_config(shapes, spec)
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (target / "README.md").write_text(card)


def merge_adapter(
    spec: ModelSpec,
    arrays: Mapping[str, np.ndarray],
    settings: LoraSettings,
    directory: str | Path,
    *,
    card: str,
) -> float:
    """Write base + adapter as a Transformers directory with tokenizer and generation config.

    Before writing, the logits of the merged model are compared with those of base + adapter on a short probe
    in float32; ModelError above 1e-5 of the largest logit (at least 1). Returns the largest absolute
    difference.
    """
    import torch

    whole = dataclasses.replace(spec, dtype="float32", gradient_checkpointing=False, quantization="none")
    base = load_model(whole)
    adapted = attach(base, dataclasses.replace(settings, dtype="float32"))
    write_state(adapted, {name: np.asarray(array, np.float32) for name, array in arrays.items()}, "lora")
    before = _probe(adapted.eval())
    with quiet_notes():
        merged: Any = adapted.merge_and_unload(safe_merge=True)
    after = _probe(merged)
    difference = float((after - before).abs().max())
    if not difference <= MERGE_TOLERANCE * max(1.0, float(before.abs().max())):
        raise model_error(
            "merged model differs from base + adapter",
            got=difference,
            allowed=f"{MERGE_TOLERANCE} of the largest logit",
            remedy="Export the adapter instead, and report the model's architecture.",
        )
    if spec.quantization != "none":
        log.warning(
            "merged into the full-precision base; the adapter was trained beside a base in %s: on a probe the logits "
            "differ by %.3g of the largest one",
            spec.quantization,
            float((after - _trained_logits(spec, arrays, settings)).abs().max()) / float(after.abs().max()),
        )
    _save_model(merged.to(getattr(torch, spec.dtype)), spec, directory, card)
    return difference


def _trained_logits(spec: ModelSpec, arrays: Mapping[str, np.ndarray], settings: LoraSettings) -> Any:
    """Return the probe's logits of the quantised base with its adapter: what was trained."""
    base = load_model(dataclasses.replace(spec, dtype="float32", gradient_checkpointing=False))
    adapted = attach(base, dataclasses.replace(settings, dtype="float32"))
    write_state(adapted, {name: np.asarray(array, np.float32) for name, array in arrays.items()}, "lora")
    return _probe(adapted.eval())


def save_full(
    directory: str | Path,
    model_or_spec: PreTrainedModel | ModelSpec,
    arrays: Mapping[str, np.ndarray],
    *,
    spec: ModelSpec | None = None,
    card: str,
) -> None:
    """Write a model trained in full mode: `arrays` are those of `read_state(model, "full")`.

    Give the ModelSpec, or a model of the right shape (its weights are overwritten) together with `spec`,
    which names the tokenizer.
    """
    if isinstance(model_or_spec, ModelSpec):
        model, spec = load_model(model_or_spec), model_or_spec
    else:
        model = model_or_spec
    if spec is None:
        raise model_error(
            "spec is missing", got=spec, allowed="a ModelSpec", remedy="Pass spec= with the model."
        )
    write_state(model, arrays, "full")
    _save_model(model, spec, directory, card)


def _save_model(model: Any, spec: ModelSpec, directory: str | Path, card: str) -> None:
    tokenizer = load_tokenizer(spec)
    generation = model.generation_config
    generation.eos_token_id = _with_eos(generation.eos_token_id, tokenizer.eos_token_id)
    generation.pad_token_id = tokenizer.pad_token_id
    # Training runs without the cache, whoever generates wants it.
    generation.use_cache = model.config.use_cache = True
    # Otherwise a reader rebuilds the generation config from the model config, with the eos of the base.
    generation._from_model_config = False
    with quiet_progress(), quiet_notes(), atomic_directory(directory) as target:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        (target / "README.md").write_text(card)


def _with_eos(known: int | list[int] | None, eos: int) -> int | list[int]:
    """Return the generation config's eos with the token trained on among them."""
    ids = [] if known is None else [known] if isinstance(known, int) else list(known)
    if eos not in ids:
        ids.append(eos)
    return ids[0] if len(ids) == 1 else ids


def _adapter_config(shapes: Any, spec: ModelSpec) -> dict[str, Any]:
    """Return PEFT's own config as JSON data, with sets sorted and the base named portably."""
    config = shapes.peft_config["default"].to_dict()
    config["base_model_name_or_path"] = spec.portable_name
    config["revision"] = spec.revision or None
    config["inference_mode"] = True
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def _probe(model: Any) -> Any:
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(PROBE_TOKENS)[None] * 37 + 11) % vocabulary
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits
