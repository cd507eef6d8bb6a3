"""The adapter's settings and what follows from them alone: the rank and the scale of each layer.

    s = alpha / r            rslora: s = alpha / sqrt(r)      (Kalajdzievski, arXiv 2312.03732)

`scale_of` is the only place where s is computed, for the server, the sites and the export alike: the scale
lies in the settings and not in the tensors, and the same factors under another alpha load without complaint.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from umbel.models.problem import model_error
from umbel.models.source import DTYPES

ALL_LINEAR = "all-linear"
_TARGETS = (f"{ALL_LINEAR} or comma-separated layer names", f"Use {ALL_LINEAR}.")


@dataclass(frozen=True)
class LoraSettings:
    """The adapter's hyper-parameters; every field but `dropout` is part of its fingerprint.

    `target_modules` and `modules_to_save` are comma-separated names, each the last parts of a module's dotted
    name; `all-linear` means every linear layer but the output head. `rank_pattern` and `alpha_pattern` are
    comma-separated `name=value`, where name is a regular expression for the last parts of a module's name;
    the first one that fits wins. `dtype` is that of the adapter, whatever the base's.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: str = ALL_LINEAR
    rslora: bool = False
    dora: bool = False
    rank_pattern: str = ""
    alpha_pattern: str = ""
    modules_to_save: str = ""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check("lora.rank", self.rank, self.rank >= 1, "an integer of at least 1", "Use 8 or 16.")
        check("lora.alpha", self.alpha, 0 < self.alpha < math.inf, "a number above 0", "Use twice the rank.")
        check("lora.dropout", self.dropout, 0 <= self.dropout < 1, "a number in [0, 1)", "Use 0.")
        check("lora.dtype", self.dtype, self.dtype in DTYPES, ", ".join(DTYPES), "Use float32.")
        check("lora.target-modules", self.target_modules, bool(names_in(self.target_modules)), *_TARGETS)
        ranks = parse_pattern("lora.rank-pattern", self.rank_pattern)
        whole = all(value >= 1 and float(value).is_integer() for value in ranks.values())
        check("lora.rank-pattern", self.rank_pattern, whole, "ranks of at least 1", "Use whole numbers.")
        alphas = parse_pattern("lora.alpha-pattern", self.alpha_pattern)
        positive = all(0 < value < math.inf for value in alphas.values())
        check("lora.alpha-pattern", self.alpha_pattern, positive, "numbers above 0", "Use twice the rank.")


def rank_of(settings: LoraSettings, module_name: str) -> int:
    """Return the rank of one module: its pattern's, or `settings.rank`."""
    return int(_matching(settings.rank_pattern, module_name, settings.rank))


def scale_of(settings: LoraSettings, module_name: str) -> float:
    """Return s = alpha/r, or alpha/sqrt(r) with rslora, of one module; patterns decide alpha and r."""
    rank = rank_of(settings, module_name)
    alpha = _matching(settings.alpha_pattern, module_name, settings.alpha)
    return alpha / math.sqrt(rank) if settings.rslora else alpha / rank


def parse_pattern(key: str, text: str) -> dict[str, float]:
    """Return `{"q_proj": 4.0}` for `"q_proj=4"`; ModelError for anything else."""
    pattern: dict[str, float] = {}
    for part in names_in(text):
        name, _, value = part.rpartition("=")
        try:
            re.compile(name)
            number = float(value)
        except (re.error, ValueError):
            name, number = "", 0.0
        check(key, text, bool(name.strip()), "comma-separated name=value", "For example q_proj=4,v_proj=8.")
        pattern[name.strip()] = number
    return pattern


def fits(pattern: str, module_name: str) -> bool:
    """Return whether `pattern` is the whole name or its last dotted parts (PEFT's rule)."""
    return re.match(rf"(.*\.)?({pattern})$", module_name) is not None


def names_in(text: str) -> list[str]:
    """Return the comma-separated names of a setting, blanks removed."""
    return [part.strip() for part in text.split(",") if part.strip()]


def check(key: str, value: Any, fine: bool, allowed: str, remedy: str) -> None:
    """Raise a four-part ModelError unless `fine`; `key` may be a whole statement of what is wrong."""
    if not fine:
        raise model_error(
            f"{key} is wrong" if " " not in key else key, got=value, allowed=allowed, remedy=remedy
        )


def _matching(pattern: str, module_name: str, default: float) -> float:
    values = parse_pattern("lora pattern", pattern)
    return next((value for key, value in values.items() if fits(key, module_name)), default)
