"""One declared setting: its default, its range and what it means.

A setting is a dataclass field made by `key(...)`. Its flat name is `group.field-name`; its type is the type of
its default, because Flower's run config knows only bool, int, float and str. `coerce` is the only place where a
raw value becomes a typed one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from umbel.errors import ConfigError

Scalar = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value of a setting may be; `low` and `high` are inclusive."""

    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    hint: str = ""

    def allowed(self, kind: type) -> str:
        """Describe the accepted values in words."""
        if self.choices:
            return " | ".join(repr(c) for c in self.choices)
        name = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[kind]
        if self.low is not None and self.high is not None:
            return f"{name} in [{self.low:g}, {self.high:g}]"
        if self.low is not None:
            return f"{name} >= {self.low:g}"
        return name


def key(default: Scalar, doc: str, **rule: Any) -> Any:
    """Declare one setting of a configuration group."""
    return dataclasses.field(default=default, metadata={"rule": Rule(doc=doc, **rule)})


def rule_of(field: dataclasses.Field) -> Rule:
    """Return the rule a field was declared with."""
    return field.metadata["rule"]


def kind_of(field: dataclasses.Field) -> type:
    """Return bool, int, float or str: the type of the field's default."""
    return type(field.default)


def coerce(name: str, field: dataclasses.Field, value: Any) -> Scalar:
    """Return `value` as the field's type, or raise ConfigError naming key, value, range and remedy."""
    kind: Any = kind_of(field)
    rule = rule_of(field)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(
            name,
            f"must be {rule.allowed(kind)}",
            got=value,
            remedy=f"It is: {rule.doc}. Its default is {field.default!r}.",
        )
    if kind is float and not math.isfinite(value):
        raise ConfigError(name, "must be a finite number", got=value, allowed=rule.allowed(kind))
    if rule.choices and value not in rule.choices:
        raise ConfigError(
            name, "is not one of the choices", got=value, allowed=rule.allowed(kind), remedy=rule.hint
        )
    too_low = rule.low is not None and value < rule.low
    too_high = rule.high is not None and value > rule.high
    if too_low or too_high:
        raise ConfigError(
            name,
            "is out of range",
            got=value,
            allowed=rule.allowed(kind),
            remedy=rule.hint or f"It is: {rule.doc}.",
        )
    return value
