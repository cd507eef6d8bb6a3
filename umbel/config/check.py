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
    check_merge(config)
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
    if config.compression.feedback > 0 and (clients.late == "weight" or config.run.checkpoint_every > 1):
        raise ConfigError(
            "compression.feedback",
            "needs clients.late = 'drop' and run.checkpoint-every = 1: a site may give up a residual only when it is "
            "certain, and durable at the server, what became of its update",
            got=config.compression.feedback,
            allowed="0, or those two settings",
        )
    if train.mode == "full" and config.model.dtype != "float32" and train.optimizer_state == "keep":
        raise ConfigError(
            "train.optimizer-state",
            "= 'keep' with full training needs float32 weights",
            got=config.model.dtype,
            allowed="model.dtype = 'float32'",
        )
    return config


def fewest_updates(merge: str, byzantine: int) -> int:
    """Return the fewest updates that a merge rule is defined for with `byzantine` liars among them."""
    return 2 * byzantine + (3 if merge in ("krum", "multi-krum") else 1)


def check_merge(config: Config) -> None:
    """Raise ConfigError when a robust merge could commit with fewer updates than its bound, or cannot work."""
    clients = config.clients
    if clients.merge == "mean":
        return
    bound = fewest_updates(clients.merge, clients.byzantine)
    quorum = clients.quorum or -(-(clients.goal or clients.minimum) // 2)
    if quorum < bound:
        raise ConfigError(
            "clients.quorum",
            f"may be as small as {quorum}, but clients.merge = {clients.merge!r} with clients.byzantine = "
            f"{clients.byzantine} needs {bound} updates in every round",
            got=clients.quorum,
            allowed=f">= {bound}",
            remedy="Raise clients.quorum and clients.minimum, or lower clients.byzantine.",
        )
    if config.run.method not in ("fedavg", "fedit"):
        raise ConfigError(
            "clients.merge",
            f"replaces the mean of a method, and run.method = {config.run.method!r} is more than a mean",
            got=clients.merge,
            allowed="'mean', or run.method = 'fedavg' or 'fedit'",
        )
    if clients.normalise == "fixed":
        raise ConfigError(
            "clients.normalise",
            f"= 'fixed' has no meaning with clients.merge = {clients.merge!r}",
            got=clients.normalise,
            allowed="'received'",
        )
