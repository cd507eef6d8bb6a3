"""A part of a model with only its own tensors in memory, read from a safetensors checkpoint.

    whole model on the meta device (names and shapes)  ->  part of it  ->  the part's tensors, each read by its whole name

Shards that hold nothing of the part are not opened. A tensor that is missing, or has another shape, is an error; values
that no file holds (rotary tables) come from the module's own constructor. The adapter starts at zero: a round's
instruction overwrites all of it. Built-in models are made whole: they are tiny and lie in no file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from umbel.errors import ModelError
from umbel.models.lora import LoraSettings
from umbel.models.parts import Cut, Part
from umbel.models.source import ModelSpec, load_model, local_directory, meta_model


def load_part(spec: ModelSpec, settings: LoraSettings, cut: Cut, part: str, device: str = "cpu") -> Part:
    """Return `part` ('head', 'body' or 'tail') with its adapter on `device`; raises ModelError naming a bad tensor."""
    return load_parts(spec, settings, cut, (part,), device)[part]


def load_parts(
    spec: ModelSpec, settings: LoraSettings, cut: Cut, parts: tuple[str, ...], device: str = "cpu"
) -> dict[str, Part]:
    """Return several parts of one model; tensors that they share (a tied embedding) are in memory once."""
    from umbel.models.adapter import attach

    if spec.is_builtin or spec.quantization != "none":
        model = attach(load_model(spec), settings).to(device)
        model.eval()
        return {part: Part(model, cut, part) for part in parts}
    model = attach(meta_model(spec), settings)
    model.config.use_cache = False
    model.eval()
    reader = Reader(local_directory(spec), model)
    found = {}
    for name in parts:
        made = Part(model, cut, name)
        roots = [made.inner] + ([made.output] if made.output is not None else [])
        for root in roots:
            reader.fill(root, device)
        made.refresh(model, cut)
        found[name] = made
    return found


class Reader:
    """Reads tensors of one checkpoint into modules on the meta device; `opened` are the files that were read."""

    def __init__(self, directory: Path, model: Any) -> None:
        self.directory = directory
        self.opened: set[str] = set()
        self._files = files_of(directory)
        base = model.get_base_model()
        self._prefix = base.base_model_prefix + "."
        named = [
            (n.replace(".base_layer.", "."), p) for n, p in base.named_parameters(remove_duplicate=False)
        ]
        # Kept alive: their identities are the keys below.
        self._originals = [p for _, p in named]
        self._names: dict[int, list[str]] = {}
        for name, parameter in named:
            # A tied matrix has several names; a checkpoint holds it under one of them.
            self._names.setdefault(id(parameter), []).append(name)
        self._made: dict[int, Any] = {}

    def fill(self, root: Any, device: str) -> None:
        """Give every parameter and buffer below `root` its values."""
        import torch

        for module in root.modules():
            for name, value in list(module._parameters.items()):
                if value is None or not value.is_meta:
                    continue
                key = id(value)
                if key not in self._made:
                    made = torch.nn.Parameter(self._value(value, device), requires_grad=value.requires_grad)
                    self._made[key] = made
                module._parameters[name] = self._made[key]
            if any(b is not None and b.is_meta for b in module._buffers.values()):
                self._buffers(module, device)

    def _value(self, value: Any, device: str) -> Any:
        import torch

        names = self._names[id(value)]
        if ".lora_" in names[0]:
            return torch.zeros(value.shape, dtype=value.dtype, device=device)
        return self._read(names, value, device)

    def _read(self, names: list[str], value: Any, device: str) -> Any:
        from safetensors import safe_open

        tried = [*names, *(name.removeprefix(self._prefix) for name in names)]
        key = next((n for n in tried if n in self._files), None)
        if key is None:
            raise ModelError(
                f"The checkpoint in {self.directory} has no tensor {names[0]!r}. Get the complete checkpoint."
            )
        with safe_open(self._files[key], framework="pt") as file:
            tensor = file.get_tensor(key)
        self.opened.add(self._files[key].name)
        if tuple(tensor.shape) != tuple(value.shape):
            got, want = tuple(tensor.shape), tuple(value.shape)
            raise ModelError(f"Tensor {key!r} of {self.directory} has shape {got}, the model needs {want}.")
        return tensor.to(device=device, dtype=value.dtype)

    def _buffers(self, module: Any, device: str) -> None:
        """Fill buffers that lie in no file with what the module's constructor computes."""
        import torch

        with torch.device(device):
            fresh = type(module)(module.config)
        for name, value in list(module._buffers.items()):
            if value is not None and value.is_meta:
                module._buffers[name] = getattr(fresh, name)


def files_of(directory: Path) -> dict[str, Path]:
    """Return tensor name -> file, from the index or from the single file's header."""
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {n: directory / f for n, f in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    found: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found
