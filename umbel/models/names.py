"""Canonical names: a tensor is called the same with and without PEFT around the model, on every machine.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight
    ->               model.layers.0.self_attn.q_proj.lora_A.weight

Names are taken apart at the dots, never searched for substrings, so a module or adapter that happens to be
called `lora` keeps its name. Buffers carry the prefix `buffer:`, because a running mean must not go through a
server optimiser and the name is all that the server sees.
"""

from __future__ import annotations

ADAPTER = "default"
WRAPPER = "base_model.model."
BUFFER = "buffer:"
_FACTORS = ("lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save")


def strip_wrapper(name: str) -> str:
    """Return a module's or parameter's name without PEFT's outer wrapper."""
    return name.removeprefix(WRAPPER)


def canonical(name: str) -> str | None:
    """Return the canonical name of a trainable parameter of a PEFT model, None if it is no adapter's.

    Factors keep PEFT's own saved form (`x.lora_A.weight`, `x.lora_magnitude_vector`); a saved module takes
    the name it has in the base model (`score.weight`).
    """
    parts = strip_wrapper(name).split(".")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index] == ADAPTER and parts[index - 1] in _FACTORS:
            kind, before, after = parts[index - 1], parts[: index - 1], parts[index + 1 :]
            if kind == "modules_to_save":
                return ".".join(before + after)
            if kind == "lora_magnitude_vector":
                return ".".join([*before, kind])
            return ".".join([*before, kind, *after])
    return None


def role_of(name: str) -> str:
    """Return `lora_A`, `lora_B`, `buffer` or `param` for a canonical name."""
    if name.startswith(BUFFER):
        return "buffer"
    parts = name.split(".")
    factor = len(parts) >= 2 and parts[-1] == "weight" and parts[-2] in ("lora_A", "lora_B")
    return parts[-2] if factor else "param"
