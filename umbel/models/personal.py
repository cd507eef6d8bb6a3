"""Between a global adapter and a site's own: interpolation of the updates, and a form that adapter servers take.

    W = W_0 + (1 - t) s_g B_g A_g + t s_o B_o A_o  ->  A = [(1 - t) s_g A_g; t s_o A_o],  B = [B_g, B_o],  scale 1

Mixing the factors themselves would add cross terms that neither adapter has. The rank is the sum of the two, the same
for all layers (missing directions are zero).

Servers of many adapters (vLLM's multi-LoRA among them) read `r`, `lora_alpha` and `use_rslora` of a PEFT folder and
no pattern: a layer with a rank or alpha of its own would be scaled wrongly there. `uniform` writes such an adapter at one
rank and scale 1; one without patterns is left as it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from umbel.exchange import A, B
from umbel.models.lora import LoraSettings, scale_of
from umbel.models.names import WRAPPER
from umbel.models.problem import model_error

Arrays = Mapping[str, np.ndarray]


def interpolated(
    shared: tuple[Arrays, LoraSettings], own: tuple[Arrays, LoraSettings], share: float
) -> tuple[dict[str, np.ndarray], LoraSettings]:
    """Return one adapter (float32) whose update is (1 - share) of the shared one's plus `share` of the own one's.

    Raises ModelError for a share outside [0, 1] or adapters of different layers.
    """
    if not 0 <= share <= 1:
        raise model_error("share is wrong", got=share, allowed="a number in [0, 1]", remedy="Use 0.5.")
    for arrays, _ in (shared, own):
        _factors_alone(arrays)
    (a, b), names = (shared, own), [sorted(m for m in x[0] if m.endswith((A, B))) for x in (shared, own)]
    if names[0] != names[1]:
        odd = sorted(set(names[0]) ^ set(names[1]))[:3]
        raise model_error(
            "the two adapters do not cover the same layers",
            got=", ".join(odd),
            allowed="adapters of one run",
            remedy="Give the adapter of a site that took part in this run.",
        )
    return _one_rank([(1 - share, *a), (share, *b)])


def uniform(arrays: Arrays, settings: LoraSettings) -> tuple[dict[str, np.ndarray], LoraSettings]:
    """Return an adapter of the same logits without rank and alpha patterns; unchanged when it has none."""
    if not settings.rank_pattern and not settings.alpha_pattern:
        return dict(arrays), settings
    _factors_alone(arrays)
    return _one_rank([(1.0, arrays, settings)])


def _factors_alone(arrays: Arrays) -> None:
    others = sorted(n for n in arrays if not n.endswith((A, B)))
    if others:
        raise model_error(
            "an adapter with more than factors cannot be stacked",
            got=", ".join(others[:3]),
            allowed="lora_A and lora_B alone",
            remedy="Export it as it is, or merge it.",
        )


def _one_rank(parts: list[tuple[float, Arrays, LoraSettings]]) -> tuple[dict[str, np.ndarray], LoraSettings]:
    first, found = parts[0][1], {}
    modules = [n.removesuffix(A) for n in first if n.endswith(A)]
    rank = max(sum(len(arrays[m + A]) for _, arrays, _ in parts) for m in modules)
    for m in modules:
        a = np.concatenate(
            [np.float32(w * scale_of(s, m)) * x[m + A].astype(np.float32) for w, x, s in parts]
        )
        b = np.concatenate([x[m + B].astype(np.float32) for _, x, _ in parts], axis=1)
        found[m + A] = np.pad(a, ((0, rank - len(a)), (0, 0)))
        found[m + B] = np.pad(b, ((0, 0), (0, rank - len(a))))
    settings = dataclasses.replace(
        parts[0][2],
        rank=rank,
        alpha=float(rank),
        rslora=False,
        rank_pattern="",
        alpha_pattern="",
        dtype="float32",
    )
    return found, settings


def read_adapter(folder: str | Path, like: LoraSettings) -> tuple[dict[str, np.ndarray], LoraSettings]:
    """Return (arrays by canonical names, settings) of a PEFT folder; `like` gives what its file does not say.

    Raises ModelError when it is no such folder, or DoRA, whose update is not a product.
    """
    from safetensors.numpy import load_file

    path = Path(folder)
    try:
        config = json.loads((path / "adapter_config.json").read_text("utf-8"))
        arrays = load_file(path / "adapter_model.safetensors")
    except (OSError, ValueError) as error:
        raise model_error(
            "no adapter can be read there",
            got=str(folder),
            allowed="a folder with adapter_config.json and adapter_model.safetensors",
            remedy="A site's own adapter is in `adapter/` of its state folder.",
        ) from error
    if config.get("use_dora"):
        raise model_error(
            "DoRA adapters cannot be mixed", got=True, allowed="use_dora = false", remedy="Merge it instead."
        )
    settings = dataclasses.replace(
        like,
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        rank_pattern=_pattern(config.get("rank_pattern")),
        alpha_pattern=_pattern(config.get("alpha_pattern")),
    )
    return {name.removeprefix(WRAPPER): array for name, array in arrays.items()}, settings


def _pattern(found: Mapping[str, float] | None) -> str:
    return ",".join(f"{name}={value:g}" for name, value in (found or {}).items())
