"""What travels between server and site in a round, described so small that both sides compute the same tensors.

A `Form` names the tensors of one direction; with the adapted modules it gives every name, shape and dtype:

    m.lora_A.weight [r, in]   m.lora_B.weight [out, r]     the trained adapter, or one factor of it
    m.carry_A [c, in]         m.carry_B [out, c]           the frozen side adapter, scale 1, always float32
    m.lora_B.core [h, q, q]                                cores between frozen B and A, q = r / h
    segment [n]                                            one part of the flattened adapter

c is cut at min(in, out) of each module. An `Exchange` is one site's round: both forms, what it trains, and what it
draws from the run's seed or keeps on its own disk instead of receiving it. No values and no codec here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

A, B, CORE = ".lora_A.weight", ".lora_B.weight", ".lora_B.core"
CARRY_A, CARRY_B = ".carry_A", ".carry_B"
SKETCH_IN, SKETCH_OUT = ".sketch_in", ".sketch_out"
SEGMENT = "segment"
SUFFIXES = {"A": A, "B": B}


class Module(Protocol):
    """What is needed to know of an adapted layer."""

    @property
    def name(self) -> str: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def rank(self) -> int: ...


@dataclass(frozen=True)
class Form:
    """Tensors of one direction. `rank` 0 is each module's own; `cores` is the number of heads h, 0 for none.

    `sketch` is the number of columns of a randomised sketch, `sketch_side` "out" (B A O) or "in" (its transpose).
    `part` (index, count) cuts everything named so far, flattened in order of names, to one segment.
    """

    factors: str = "AB"
    rank: int = 0
    carry: int = 0
    cores: int = 0
    sketch: int = 0
    sketch_side: str = "out"
    part: tuple[int, int] = (0, 0)

    def names(self, module: str) -> list[str]:
        """Return the names of one module's tensors, before any cut into segments."""
        found = [module + SUFFIXES[f] for f in self.factors]
        found += [module + CARRY_A, module + CARRY_B] if self.carry else []
        found += [module + CORE] if self.cores else []
        return found + (
            [module + (SKETCH_OUT if self.sketch_side == "out" else SKETCH_IN)] if self.sketch else []
        )

    def tensors(self, modules: Iterable[Module], dtype: np.dtype) -> dict[str, np.ndarray]:
        """Return arrays of the right shape and dtype by name; they share one zero and take no memory."""
        found: dict[str, np.ndarray] = {}
        for m in modules:
            rank, side = self.rank or m.rank, min(self.carry, m.in_features, m.out_features)
            columns = min(self.sketch, m.in_features, m.out_features)
            shapes = {
                A: (rank, m.in_features),
                B: (m.out_features, rank),
                CARRY_A: (side, m.in_features),
                CARRY_B: (m.out_features, side),
                CORE: (self.cores, rank // max(1, self.cores), rank // max(1, self.cores)),
                SKETCH_OUT: (m.out_features, columns),
                SKETCH_IN: (m.in_features, columns),
            }
            for name in self.names(m.name):
                suffix = name.removeprefix(m.name)
                kind = dtype if suffix in (A, B, CORE) else np.dtype(np.float32)
                found[name] = np.broadcast_to(np.zeros((), kind), shapes[suffix])
        if not self.part[1]:
            return found
        start, stop = segment_bounds(sum(a.size for a in found.values()), self.part)
        return {SEGMENT: np.broadcast_to(np.zeros((), np.float32), (stop - start,))}

    def pick(self, arrays: Mapping[str, np.ndarray], modules: Iterable[Module]) -> dict[str, np.ndarray]:
        """Return this form's tensors out of a larger set; KeyError when one is missing."""
        found = {name: arrays[name] for m in modules for name in self.names(m.name)}
        if not self.part[1]:
            return found
        flat = flatten(found)
        start, stop = segment_bounds(flat.size, self.part)
        return {SEGMENT: flat[start:stop].copy()}


def flatten(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return all arrays one after the other in order of names, float32."""
    return np.concatenate([np.asarray(arrays[n], np.float32).reshape(-1) for n in sorted(arrays)])


def unflatten(flat: np.ndarray, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Cut a vector made by `flatten` into arrays shaped and typed as `like`."""
    edges = np.cumsum([0, *(like[n].size for n in sorted(like))])
    return {
        name: flat[start:stop].reshape(like[name].shape).astype(like[name].dtype)
        for name, (start, stop) in zip(sorted(like), pairwise(edges.tolist()), strict=True)
    }


def segment_bounds(size: int, part: tuple[int, int]) -> tuple[int, int]:
    """Return [start, stop) of segment (index, count); lengths differ by at most one."""
    index, count = part
    return size * index // count, size * (index + 1) // count


@dataclass(frozen=True)
class Exchange:
    """One site's round.

    `trains`: "AB", "A", "B", "core", "gradient" (of the base weights, none is changed) or "" for none. `seeded`:
    factors the site draws from the run's seed; `frozen_crc` is what they must come to. `own`: factors that live on
    the site's disk and never travel. `probe`: key of the sketch's random matrix. `keep`: the trained factors stay on
    the site's disk until the next round; `again`: answer from those, without training. `hold`: frozen factors the
    site keeps for the next round; `stored`: those it is not sent because it held them in the round just committed
    (`frozen_crc` again).
    """

    down: Form = field(default_factory=Form)
    up: Form = field(default_factory=Form)
    trains: str = "AB"
    seeded: str = ""
    frozen_crc: str = ""
    own: str = ""
    probe: int = 0
    hold: str = ""
    stored: str = ""
    keep: bool = False
    again: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; what has its default is left out."""
        plain = Exchange()
        found = dataclasses.asdict(self)
        return {k: v for k, v in found.items() if getattr(self, k) != getattr(plain, k)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Exchange:
        """Inverse of `to_dict`; raises TypeError for a field that this version does not know."""
        known = dict(values)
        for key in ("down", "up"):
            if key in known:
                inner = dict(known[key])
                inner["part"] = tuple(inner.get("part", (0, 0)))
                known[key] = Form(**inner)
        return cls(**known)
