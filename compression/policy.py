"""Policies: which pipeline each tensor travels through, by role and size, as data.

    "int8(256,rtn)"                               one spec for everything that may be lossy
    "lora_a=int8(256,sr);lora_b=bf16;*=exact"     by role
    "int4(64,rtn);min=1024"                       a smaller size threshold than 4096 elements

Fixed part of every policy: integers and booleans, buffers, tensors under `min` elements, norms and biases
travel exactly. Both sides compute the grouping from (layout, policy), so a frame says nothing per tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from compression.layout import FLOAT_DTYPES, Layout, Role, TensorSpec
from compression.spec import KEY, Pipeline, parse
from umbel.errors import ConfigError

MIN_NUMEL = 4096
EXACT = parse("exact")
_ALIASES = {"raw": "exact", "none": "exact"}
_NORM_OR_BIAS = re.compile(r"(^|[._])(\w*norm\w*|bias|ln\w*)([._]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Policy:
    """Rules as (role or "*", pipeline), the first match wins; `min_numel` in elements."""

    rules: tuple[tuple[str, Pipeline], ...]
    min_numel: int = MIN_NUMEL

    def __str__(self) -> str:
        return self._render(str)

    def wire(self) -> str:
        """The text that goes into a frame: floats in hex."""
        return self._render(Pipeline.wire)

    def _render(self, show: Callable[[Pipeline], str]) -> str:
        if len(self.rules) == 1 and self.rules[0][0] == "*":
            parts = [show(self.rules[0][1])]
        else:
            parts = [f"{role}={show(pipeline)}" for role, pipeline in self.rules]
        return ";".join(parts + ([f"min={self.min_numel}"] if self.min_numel != MIN_NUMEL else []))

    def pipeline_for(self, entry: TensorSpec) -> Pipeline:
        """The pipeline of one tensor."""
        if travels_exactly(entry, self.min_numel):
            return EXACT
        return next((p for role, p in self.rules if role in ("*", entry.role.value)), EXACT)

    def groups(self, layout: Layout) -> list[tuple[Pipeline, tuple[int, ...]]]:
        """(pipeline, indices of its entries) for every pipeline in use, in order of its first entry."""
        found: dict[Pipeline, list[int]] = {}
        for index, entry in enumerate(layout.entries):
            found.setdefault(self.pipeline_for(entry), []).append(index)
        return [(pipeline, tuple(indices)) for pipeline, indices in found.items()]


def travels_exactly(entry: TensorSpec, min_numel: int = MIN_NUMEL) -> bool:
    """True for what no lossy stage may touch: non-floats, buffers, small tensors, norms and biases."""
    if entry.dtype not in FLOAT_DTYPES or entry.role is Role.BUFFER or entry.numel < max(min_numel, 1):
        return True
    return len(entry.shape) < 2 and _NORM_OR_BIAS.search(entry.name) is not None


def parse_policy(text: str) -> Policy:
    """Read a policy string; `parse_policy(str(p)) == p`. Raises ConfigError."""
    rules: list[tuple[str, Pipeline]] = []
    min_numel = MIN_NUMEL
    for part in (piece.strip() for piece in text.split(";")):
        left, found, right = part.partition("=")
        if found and left == "min":
            min_numel = _read_min(right)
        elif found and left in _ROLES:
            rules.append((left, _pipeline(right)))
        else:
            rules.append(("*", _pipeline(part)))
    roles = [role for role, _ in rules]
    if not rules or len(set(roles)) != len(roles):
        raise ConfigError(
            KEY, "must give one spec a role, each role once", got=text, allowed=", ".join(sorted(_ROLES))
        )
    return Policy(tuple(rules), min_numel)


_ROLES = {"*", *(role.value for role in Role)}


def _pipeline(text: str) -> Pipeline:
    return parse(_ALIASES.get(text, text))


def _read_min(text: str) -> int:
    if not text.isdecimal() or int(text) > 1 << 31:
        raise ConfigError(f"{KEY} min", "is not a number of elements", got=text, allowed="0 to 2147483648")
    return int(text)
