"""What two sites compare before round 1: base weights, tokenizer, adapter.

Tensors that load without complaint can still mean something else: another revision of the base, two more
tokens, another alpha. Each fingerprint is the hex SHA-256 of a canonical JSON or byte stream, equal on every
machine. The base's costs one pass over the weights and is remembered on disk under the files' paths, sizes
and times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.fsio import write_atomic
from umbel.models import builtin
from umbel.models.adapter import AdaptedModule, LoraSettings
from umbel.models.quantised import BLOCK
from umbel.models.source import BUILTIN, ModelSpec, load_config, load_model, local_directory
from umbel.models.state import read_state

if TYPE_CHECKING:
    from torch import nn

FORMAT = 1
PROBE = "Don't pay 1234.5 \u20ac\n\n  for  7 na\u00efve caf\u00e9s,\t\u4f60\u597d \U0001f642! x_1 = {2**10}"


def base_fingerprint(spec: ModelSpec) -> str:
    """Return the SHA-256 of the base as it is held in memory, in `spec.dtype`.

    A built-in model is its seed and settings. Any other is loaded once and hashed by `weights_sha256`. Of a quantised
    base the full-precision one is hashed, together with the kind of its codes.
    """
    if spec.quantization != "none":
        whole = base_fingerprint(replace(spec, quantization="none"))
        return _sha256_json([whole, spec.quantization, BLOCK])
    if spec.is_builtin:
        name = spec.name.removeprefix(BUILTIN)
        return _sha256_json([name, builtin.SEED, builtin.settings_of(name), spec.dtype])
    if not spec.has_weights:
        # The weights come from the server: what must agree is the architecture.
        return _sha256_json(["scratch", load_config(spec).to_dict(), spec.dtype])
    directory = local_directory(spec)
    note = spec.cache / "fingerprints" / f"{_sha256_json([FORMAT, spec.dtype, _files_key(directory)])}.json"
    remembered = _read_note(note)
    if remembered:
        return remembered
    value = weights_sha256(load_model(spec))
    _write_note(note, value)
    return value


def weights_sha256(model: nn.Module) -> str:
    """Return the hash over name, dtype, shape and bytes of every unique tensor, in sorted order of names."""
    digest = hashlib.sha256()
    for name, array in sorted(read_state(model, "full").items()):
        digest.update(json.dumps([name, str(array.dtype), list(array.shape)]).encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return `<ids>-<hash>` over vocabulary, special ids, chat template and the cuts of a probe text.

    The number of ids is left readable, since two added tokens are the usual difference. The probe tells apart
    tokenizers of one vocabulary that split blanks or digits by different rules.
    """
    specials = {key: getattr(tokenizer, f"{key}_token_id") for key in ("bos", "eos", "pad", "unk")}
    probe = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    vocabulary = sorted(tokenizer.get_vocab().items())
    return f"{len(tokenizer)}-{_sha256_json([vocabulary, specials, tokenizer.chat_template, probe])}"


def adapter_fingerprint(settings: LoraSettings, modules: Iterable[AdaptedModule]) -> str:
    """Return the hash of what decides the factors' meaning: settings but dropout, and the adapted layers."""
    meaning = {key: value for key, value in asdict(settings).items() if key != "dropout"}
    meaning["alpha"] = float(settings.alpha)
    return _sha256_json([meaning, sorted(list(module) for module in modules)])


def _files_key(directory: Path) -> list[list[Any]]:
    files = sorted([*directory.glob("*.safetensors"), directory / "config.json"])
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _read_note(note: Path) -> str:
    try:
        return str(json.loads(note.read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _write_note(note: Path, value: str) -> None:
    """Remember the value; a cache that cannot be written only costs the next process the time."""
    with suppress(OSError):
        write_atomic(note, json.dumps({"sha256": value}).encode())


def _sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
