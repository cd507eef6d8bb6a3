"""From raw values to a frozen `Config`, and back.

Three edges meet here: Flower's flat run config (`from_run_config`), a recipe file with overrides (`resolve`) and
the JSON that travels in an instruction (`to_json` / `from_json`). An unknown key fails with the nearest known
one; no site has been contacted by then.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbel.config.check import check
from umbel.config.keys import Scalar, coerce, kind_of, rule_of
from umbel.config.schema import Config
from umbel.errors import ConfigError

# What a site needs to reproduce the same local work; the other groups concern the server alone.
SITE_GROUPS = ("run", "model", "data", "lora", "train", "eval", "privacy")
SERVER_ONLY = ("split.bind", "split.tls-cert", "split.tls-key")


def flat_fields() -> dict[str, tuple[str, dataclasses.Field]]:
    """Return every flat key in declaration order as {'group.key': (group, field)}."""
    found = {}
    for group in dataclasses.fields(Config):
        for item in dataclasses.fields(group.default_factory):  # type: ignore[arg-type]
            found[f"{group.name}.{item.name.replace('_', '-')}"] = (group.name, item)
    return found


def to_flat(config: Config) -> dict[str, Scalar]:
    """Return the configuration as Flower sees it: flat dotted keys and scalars."""
    return {name: getattr(getattr(config, group), item.name) for name, (group, item) in flat_fields().items()}


def from_run_config(values: Mapping[str, Any], *, whole: bool = True) -> Config:
    """Parse flat values into a checked `Config`; keys left out take their defaults.

    `whole` is False for the part of a configuration that travels: what needs the other groups is not compared then.

    Raises ConfigError for an unknown key, a wrong type, a value out of range or a contradiction.
    """
    known = flat_fields()
    groups: dict[str, dict[str, Scalar]] = {}
    for name, value in values.items():
        if name not in known:
            raise unknown_key(name, value)
        group, item = known[name]
        groups.setdefault(group, {})[item.name] = coerce(name, item, value)
    parts = {
        group.name: group.default_factory(**groups.get(group.name, {}))  # type: ignore[misc, operator]
        for group in dataclasses.fields(Config)
    }
    return check(Config(**parts), whole=whole)


def unknown_key(name: str, value: Any) -> ConfigError:
    """Build the error for a key that does not exist, with the nearest one that does."""
    known = list(flat_fields())
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not near:
        tail = name.rsplit(".", 1)[-1]
        near = [k for k in known if k.rsplit(".", 1)[-1] == tail][:1]
    remedy = f"Did you mean {near[0]!r}?" if near else "`umbel keys` lists every key."
    groups = ", ".join(f.name for f in dataclasses.fields(Config))
    return ConfigError(
        name, "is not a setting", got=value, allowed=f"keys of the groups {groups}", remedy=remedy
    )


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested TOML tables into dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{full}."))
        else:
            flat[full] = value
    return flat


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a recipe (TOML) into flat keys; ConfigError when it is missing or not TOML."""
    path = Path(path)
    try:
        return flatten(tomllib.loads(path.read_text("utf-8")))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(
            "recipe",
            "does not exist",
            got=str(path),
            allowed="a TOML file",
            remedy="`umbel recipes` lists the shipped ones.",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("recipe", f"is not TOML ({error})", got=str(path)) from None


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `group.key=value`; the value is TOML, or a bare string where the setting is a string."""
    name, sep, raw = text.partition("=")
    name, raw = name.strip(), raw.strip()
    if not sep or not name:
        raise ConfigError(
            "--set", "is not of the form key=value", got=text, remedy="Example: --set run.rounds=5"
        )
    known = flat_fields().get(name)
    if known is not None and kind_of(known[1]) is str:
        quoted = len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "\"'"
        return name, raw[1:-1] if quoted else raw
    try:
        return name, tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return name, raw


def resolve(recipe: str | Path | None = None, overrides: list[str] | None = None) -> Config:
    """Merge defaults, a recipe and `key=value` overrides, in this order, into a checked `Config`."""
    values = read_recipe(recipe) if recipe is not None else {}
    values.update(parse_override(text) for text in overrides or [])
    return from_run_config(values)


def to_toml(config: Config) -> str:
    """Return the whole configuration as commented TOML that `resolve` reads back to an equal object."""
    import tomli_w

    lines: list[str] = []
    current = ""
    for group, item in flat_fields().values():
        if group != current:
            lines.append(f"\n[{group}]" if lines else f"[{group}]")
            current = group
        value = getattr(getattr(config, group), item.name)
        text = tomli_w.dumps({item.name.replace("_", "-"): value}).strip()
        lines.append(f"{text}  # {rule_of(item).doc}")
    return "\n".join(lines) + "\n"


def to_json(config: Config, groups: tuple[str, ...] = SITE_GROUPS) -> str:
    """Return the named groups as compact JSON, sorted: what an instruction carries.

    A site of a split run is told of the cut too, but not where the server listens or keeps its key.
    """
    if config.run.task == "split" and groups == SITE_GROUPS:
        groups = (*groups, "split")
    flat = {k: v for k, v in to_flat(config).items() if k not in SERVER_ONLY}
    picked = {k: v for k, v in flat.items() if k.split(".", 1)[0] in groups}
    return json.dumps(picked, sort_keys=True, separators=(",", ":"))


def from_json(text: str) -> Config:
    """Parse what `to_json` wrote; groups that did not travel take their defaults."""
    return from_run_config(json.loads(text), whole=False)
