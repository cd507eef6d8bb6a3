"""Settings that are right one by one and wrong together."""

from __future__ import annotations

from umbel.config.schema import Config
from umbel.errors import ConfigError


def check(config: Config) -> Config:
    """Return `config`, or raise ConfigError naming both settings that contradict each other."""
    clients, data, train = config.clients, config.data, config.train
    goal = clients.goal or None
    if goal and clients.quorum > goal:
        raise ConfigError(
            "clients.quorum",
            f"exceeds clients.goal = {goal}, so no round could ever commit",
            got=clients.quorum,
            allowed=f"0 (half of the goal) or 1..{goal}",
        )
    if clients.grace_seconds > clients.deadline_seconds:
        raise ConfigError(
            "clients.grace-seconds",
            f"is longer than clients.deadline-seconds = {clients.deadline_seconds:g}",
            got=clients.grace_seconds,
            allowed="at most the deadline",
            remedy="The grace ends with the deadline at the latest; lower it or raise the deadline.",
        )
    if clients.min_deadline_seconds > clients.deadline_seconds:
        raise ConfigError(
            "clients.min-deadline-seconds",
            f"is longer than clients.deadline-seconds = {clients.deadline_seconds:g}",
            got=clients.min_deadline_seconds,
            allowed="at most the deadline",
        )
    if data.partition in ("dirichlet", "column") and not data.label_column:
        raise ConfigError(
            "data.label-column",
            f"is empty but data.partition = {data.partition!r} needs it",
            got="",
            allowed="a column of the data",
        )
    if train.max_tokens < data.max_length:
        raise ConfigError(
            "train.max-tokens",
            f"is smaller than data.max-length = {data.max_length}, so a row might not fit",
            got=train.max_tokens,
            allowed=f">= {data.max_length}",
        )
    if clients.late == "weight" and clients.normalise == "fixed":
        raise ConfigError(
            "clients.late",
            "= 'weight' cannot be combined with clients.normalise = 'fixed': the cohort's weight is not defined",
            got=clients.late,
            allowed="'drop'",
        )
    if train.mode == "full" and config.model.dtype != "float32" and train.optimizer_state == "keep":
        raise ConfigError(
            "train.optimizer-state",
            "= 'keep' with full training needs float32 weights",
            got=config.model.dtype,
            allowed="model.dtype = 'float32'",
        )
    return config
