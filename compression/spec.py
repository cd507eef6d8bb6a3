"""Spec strings: the one notation for a codec, the same in a config, a log and a frame.

    pipeline = stage | stage | ...        stage = name  or  name(arg, ...)

`parse(str(p)) == p`; arguments stand in a fixed order and defaults are written out, so two equal pipelines
have one text. `wire()` is the same with floats in hex: a frame holds no decimal float. This file knows the
grammar and the type and range of every argument; which stages fit together is decided in `registry.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from umbel.errors import ConfigError

KEY = "compression"
_STAGE = re.compile(r"([a-z][a-z0-9]*)(?:\(([^()|;]*)\))?")
_POWERS = tuple(2**k for k in range(4, 17))


@dataclass(frozen=True)
class Param:
    """One stage argument. `allowed` is a tuple of values, or a (low, high] pair for numbers; None = any."""

    name: str
    kind: type
    default: Any = None
    choices: tuple[Any, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    def describe(self) -> str:
        if self.choices:
            return ", ".join(map(str, self.choices))
        return f"{self.kind.__name__} in ({self.low:g}, {self.high:g}]"

    def read(self, stage: str, text: str) -> Any:
        try:
            value = _number(text, self.kind)
        except (ValueError, OverflowError):
            value = None
        inside = (
            value in self.choices if self.choices else value is not None and self.low < value <= self.high
        )
        if value is None or not inside:
            raise ConfigError(
                f"{KEY} stage {stage}", f"has a bad {self.name}", got=text, allowed=self.describe()
            )
        return value


def _number(text: str, kind: type) -> Any:
    if kind is int:
        return int(text, 10)
    if kind is float:
        return float.fromhex(text) if "0x" in text else float(text)
    return text


def _block(default: int) -> Param:
    return Param("block", int, default, choices=_POWERS)


_ROUNDING = Param("rounding", str, "rtn", choices=("rtn", "sr"))
_SCALING = Param("scaling", str, "contractive", choices=("contractive", "unbiased"))
_LEVELS = (_SCALING,)

# name -> its parameters, in the order they are written
STAGES: dict[str, tuple[Param, ...]] = {
    "exact": (),
    "lossless": (),
    "xor": (),
    "bf16": (),
    "fp16": (),
    "fp32": (),
    "int8": (_block(256), _ROUNDING),
    "int4": (_block(64), _ROUNDING),
    "int2": (_block(256), _ROUNDING),
    "int8cb": (),
    "tok8": (_ROUNDING,),
    "sign": (_block(4096),),
    "topk": (_block(4096), Param("k", int, 64, low=0, high=65536)),
    "sign2": (),
    "rice": (),
    "flat": (),
    "had": (
        Param("block", int, 4096, choices=(64, 256, 1024, 4096, 16384)),
        Param("rounds", int, 2, choices=(1, 2)),
    ),
    "lm1": _LEVELS,
    "lm2": _LEVELS,
    "lm3": _LEVELS,
    "lm4": _LEVELS,
    "dct": (Param("side", int, 64, choices=(64,)),),
    "lowrank": (Param("rank", int, 4, low=0, high=1024),),
    "randk": (Param("fraction", float, 0.1, low=0.0, high=1.0), _SCALING),
    "ecsq": (
        Param("rate", float, low=0.01, high=8.0),
        Param("step", float, low=0.0, high=3.4e38),
        Param("rms", float, low=0.0, high=64.0),
        Param("theta", float, low=0.0, high=0.5),
    ),
    "rans": (),
    "zstd": (),
}
_KEYWORD_STAGES = frozenset({"ecsq"})  # arguments by name, absent ones not written


@dataclass(frozen=True)
class Stage:
    """A stage name and its argument values, one per parameter of `STAGES[name]`."""

    name: str
    args: tuple[Any, ...] = ()

    def __getitem__(self, param: str) -> Any:
        names = [p.name for p in STAGES[self.name]]
        return self.args[names.index(param)]

    def render(self, *, hex_floats: bool) -> str:
        def show(value: Any) -> str:
            return value.hex() if hex_floats and isinstance(value, float) else str(value)

        if self.name in _KEYWORD_STAGES:
            pairs = zip(STAGES[self.name], self.args)
            inner = ",".join(f"{p.name}={show(v)}" for p, v in pairs if v is not None)
        else:
            inner = ",".join(show(v) for v in self.args)
        return f"{self.name}({inner})" if inner else self.name


@dataclass(frozen=True)
class Pipeline:
    """Stages in order of encoding."""

    stages: tuple[Stage, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    def __str__(self) -> str:
        return "|".join(stage.render(hex_floats=False) for stage in self.stages)

    def wire(self) -> str:
        """The text that goes into a frame: floats in hex."""
        return "|".join(stage.render(hex_floats=True) for stage in self.stages)


def stage(name: str, **args: Any) -> Stage:
    """Build a stage from named arguments, defaults filled in."""
    return Stage(name, tuple(args.get(p.name, p.default) for p in STAGES[name]))


def parse(text: str) -> Pipeline:
    """Read a spec string. Raises ConfigError naming the stage, the argument, what is allowed and the
    nearest name."""
    if not isinstance(text, str) or len(text) > 400:
        raise ConfigError(
            KEY, "is not a spec string", got=str(text)[:80], allowed="text of at most 400 characters"
        )
    return Pipeline(tuple(_parse_stage(part.strip()) for part in text.split("|")))


def _parse_stage(text: str) -> Stage:
    match = _STAGE.fullmatch(text)
    if match is None or match[1] not in STAGES:
        near = get_close_matches(match[1] if match else text, STAGES, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(KEY, "names an unknown stage", got=text, allowed=", ".join(STAGES), remedy=hint)
    name, inner = match[1], (match[2] or "").strip()
    parts = [part.strip() for part in inner.split(",")] if inner else []
    return _keyword_stage(name, parts) if name in _KEYWORD_STAGES else _positional_stage(name, parts)


def _positional_stage(name: str, parts: list[str]) -> Stage:
    params = STAGES[name]
    if len(parts) > len(params):
        allowed = ", ".join(p.name for p in params) or "none"
        raise ConfigError(
            f"{KEY} stage {name}", "has too many arguments", got=",".join(parts), allowed=allowed
        )
    given = [param.read(name, part) for param, part in zip(params, parts)]
    return Stage(name, tuple(given) + tuple(p.default for p in params[len(parts) :]))


def _keyword_stage(name: str, parts: list[str]) -> Stage:
    params = {p.name: p for p in STAGES[name]}
    values: dict[str, Any] = {}
    for part in parts:
        key, found, value = part.partition("=")
        if not found or key not in params or key in values:
            raise ConfigError(
                f"{KEY} stage {name}", "has a bad argument", got=part, allowed="=, ".join(params) + "="
            )
        values[key] = params[key].read(name, value)
    return stage(name, **values)
