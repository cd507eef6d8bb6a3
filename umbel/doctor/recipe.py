"""One recipe on this machine: settings, model and tokenizer at the pinned revision, rows, memory, the bundle's hash.

Nothing is downloaded: a model on the hub counts as present only when it lies in the local cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from umbel.errors import UmbelError
from umbel.telemetry.machine import FAIL, PASS, WARN, Check
from umbel.telemetry.units import size

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Rows read to name the formats; a larger file is counted no further.
COUNTED = 100_000


def recipe_checks(path: Path, *, offline: bool = False) -> Iterator[Check]:
    """Settings, model and data of one recipe; later checks are left out when the settings are wrong."""
    from umbel.config import resolve

    try:
        config = resolve(path)
    except UmbelError as error:
        yield Check("recipe", FAIL, str(error), "Correct the key that is named.")
        return
    yield Check("recipe", PASS, path.name)
    yield model_check(config, offline=offline)
    yield data_check("data.source", config.data.source)
    if config.eval.central_data:
        yield data_check("eval.central-data", config.eval.central_data)


def model_check(config: Any, *, offline: bool = False) -> Check:
    """Is the base model on this machine? Its weights are not read. `offline`: it must not be fetched later."""
    name = config.model.name
    remedy = "Copy the model to this machine and name its folder in model.name."
    try:
        from umbel.models.source import ModelSpec, load_config

        spec = ModelSpec(name=name, revision=config.model.revision)
        if name.startswith("package:"):
            from umbel.models.gguf import package_file

            package_file(name.removeprefix("package:"))
            return Check("model", PASS, f"{name} is installed")
        path = Path(name).expanduser()
        if path.is_file():
            return Check("model", PASS, f"{name}, {path.suffix or 'file'}")
        if not spec.is_builtin and not path.exists() and name[:1] not in "/.~":
            return _hub_check(name, config.model.revision, remedy, offline=offline)
        if path.is_dir() and not any((path / file).is_file() for file in _TOKENIZERS):
            return Check("model", FAIL, f"{name} has no tokenizer", "Copy the tokenizer's files there too.")
        return Check("model", PASS, f"{name}, {load_config(spec).model_type}")
    except UmbelError as error:
        return Check("model", FAIL, str(error), remedy)
    except Exception as error:
        # A broken model folder fails in many ways inside the model library; the operator needs one line.
        return Check("model", FAIL, f"{name} cannot be read ({type(error).__name__})", remedy)


def _hub_check(name: str, revision: str, remedy: str, *, offline: bool) -> Check:
    """Are configuration, tokenizer and weights of that revision in the hub's local cache?"""
    from huggingface_hub import try_to_load_from_cache

    def cached(*files: str) -> bool:
        found = [try_to_load_from_cache(name, file, revision=revision or None) for file in files]
        return any(isinstance(path, str) for path in found)

    at = f"{name} at revision {revision or 'main'}"
    if not cached("config.json"):
        if offline:
            return Check("model", FAIL, f"{at} is not in the hub cache and cannot be fetched", remedy)
        return Check(
            "model", WARN, f"{name} is not in the hub cache and would be fetched at the start", remedy
        )
    missing = [
        what for what, files in (("tokenizer", _TOKENIZERS), ("weights", _WEIGHTS)) if not cached(*files)
    ]
    if missing:
        status = FAIL if offline else WARN
        return Check("model", status, f"{at}: {' and '.join(missing)} not in the hub cache", remedy)
    if not revision:
        pin = "Pin model.revision to a commit, so that every site loads the same files."
        return Check("model", WARN, f"{name} is in the hub cache, without a pinned revision", pin)
    return Check("model", PASS, f"{at} is in the hub cache")


def data_check(key: str, source: str) -> Check:
    """Can the first rows be read, and in which format are they?"""
    if source == "demo:":
        return Check(key, PASS, "the built-in demonstration data")
    if source.startswith("hub:"):
        remedy = "Copy the rows to a file on this machine and name it."
        return Check(key, WARN, f"{source} would be fetched at the start", remedy)
    try:
        from umbel.data.formats import detect_format
        from umbel.data.sources import load_rows

        rows = load_rows(source, limit=20)
        return Check(key, PASS, f"{source}: rows of the format {detect_format(rows).value}")
    except (UmbelError, OSError) as error:
        return Check(key, FAIL, str(error), "Real sites name their own file in node-config, key data.")


def site_data_check(source: str) -> Check:
    """Every row of a site's own file: how many there are, and in which formats."""
    if not source:
        remedy = 'Add data="/path/rows.jsonl" to UMBEL_NODE_CONFIG.'
        return Check("site data", FAIL, "the node config names no data", remedy)
    try:
        from umbel.data.formats import detect_format
        from umbel.data.sources import load_rows

        rows = load_rows(source, limit=COUNTED)
        if not rows:
            return Check("site data", FAIL, f"{source} has no rows", "Name the file with the rows.")
        kinds: Counter[str] = Counter()
        for row in rows:
            try:
                kinds[detect_format([row]).value] += 1
            except UmbelError:
                kinds["unknown"] += 1
        more = "at least " if len(rows) >= COUNTED else ""
        counts = ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
        found = f"{source}: {more}{len(rows)} rows ({counts})"
        if kinds["unknown"] == len(rows):
            return Check("site data", FAIL, found, "docs/recipes.md lists the formats of rows.")
        if len(kinds) > 1:
            return Check(
                "site data", WARN, found, "Bring all rows into one format: docs/recipes.md lists them."
            )
        return Check("site data", PASS, found)
    except (UmbelError, OSError) as error:
        return Check("site data", FAIL, str(error), "Correct the path or the file's rights.")


def memory_check(path: Path, free_bytes: int | None = None) -> Check:
    """Does what the recipe holds at a site fit? Base, adapter, gradients and moments, without activations."""
    try:
        import psutil

        from umbel.cli.plan import make_plan
        from umbel.config import resolve

        config = resolve(path)
        needed = int(make_plan(config)["site_memory_bytes"])
        where, free = "memory", psutil.virtual_memory().available if free_bytes is None else free_bytes
        if free_bytes is None and config.train.device != "cpu":
            import torch

            if torch.cuda.is_available():
                where, free = "GPU memory", torch.cuda.mem_get_info()[0]
    except UmbelError as error:
        return Check("recipe memory", WARN, f"not known: {error}", "See the check of the model.")
    except Exception as error:
        # Shapes of a model that is not here cannot be drawn; the check of the model says so.
        return Check(
            "recipe memory", WARN, f"not known ({type(error).__name__})", "See the check of the model."
        )
    found = f"needs {size(needed)} before activations, {size(free)} {where} free"
    remedy = "Choose a smaller model or rank, or quantise the base (docs/recipes.md)."
    if needed > free:
        return Check("recipe memory", FAIL, found, remedy)
    return Check("recipe memory", WARN if 2 * needed > free else PASS, found, remedy)


def bundle_check(policy_file: str = "") -> Check:
    """The hash of the bundle of this installation, against the site's policy where there is one."""
    from umbel.cli.flower import FlowerError
    from umbel.cli.inspect import bundle_hash
    from umbel.policy import read_policy

    try:
        found = bundle_hash()
        if not policy_file:
            return Check("bundle", PASS, found)
        allowed = read_policy(Path(policy_file).expanduser()).bundle.hashes
    except (FlowerError, UmbelError, OSError) as error:
        return Check("bundle", FAIL, str(error), "Correct the policy (docs/policy.md) or the installation.")
    if allowed is None:
        remedy = f'Add [bundle] hashes = ["{found}"] to the policy: any bundle is let in now.'
        return Check("bundle", WARN, found, remedy)
    if any(found.startswith(text) for text in allowed):
        return Check("bundle", PASS, f"{found}, allowed by the policy")
    remedy = "Right when the server runs another version; else add this hash to bundle.hashes."
    return Check("bundle", WARN, f"{found} is not among bundle.hashes of the policy", remedy)
