"""Settings that are right one by one and wrong together."""

from __future__ import annotations

from umbel.config.pretrain_check import check_pretrain
from umbel.config.privacy import check_privacy
from umbel.config.schema import Config
from umbel.config.split_check import check_split
from umbel.errors import ConfigError


def check(config: Config, *, whole: bool = True) -> Config:
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
    check_mode(config)
    check_steps(config)
    if whole:
        check_privacy(config)
    check_split(config)
    check_pretrain(config)
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
    if train.mode == "full" and config.model.quantization != "none":
        raise ConfigError(
            "model.quantization",
            "leaves no weights that could be trained or averaged in train.mode = 'full': a quantised matrix is a code",
            got=config.model.quantization,
            allowed="'none', or train.mode = 'lora'",
        )
    if train.mode == "full" and config.model.dtype != "float32" and train.optimizer_state == "keep":
        raise ConfigError(
            "train.optimizer-state",
            "= 'keep' with full training needs float32 weights",
            got=config.model.dtype,
            allowed="model.dtype = 'float32'",
        )
    return config


def check_steps(config: Config) -> None:
    """Raise ConfigError where a way to treat local steps does not fit what is trained and how it is averaged."""
    train, clients = config.train, config.clients
    frozen_bases = ("ravan", "fedsb")
    if train.proximal_space == "product" and (
        train.mode != "lora" or config.run.task != "sft" or config.run.method in frozen_bases
    ):
        raise ConfigError(
            "train.proximal-space",
            "= 'product' pulls the products B A of an adapter whose factors are trained in task 'sft'",
            got=f"run.task = {config.run.task!r}, train.mode = {train.mode!r}, run.method = {config.run.method!r}",
            allowed="'values'",
        )
    plain = (
        config.run.method in ("fedavg", "fedit")
        and clients.mode == "sync"
        and clients.merge == "mean"
        and clients.normalise == "received"
        and config.privacy.clip_norm == 0
    )
    if config.server.step_weights == "fednova" and not plain:
        raise ConfigError(
            "server.step-weights",
            "= 'fednova' replaces a plain weighted mean, and another rule stands there",
            got=config.server.step_weights,
            allowed="'plain', or run.method = 'fedavg' or 'fedit' with clients.mode = 'sync', clients.merge = 'mean', "
            "clients.normalise = 'received' and no privacy.clip-norm",
        )


def check_mode(config: Config) -> None:
    """Raise ConfigError where arrivals are applied at once and something needs a round of several."""
    if config.clients.mode != "async":
        return
    if config.run.method != "delayed":
        raise ConfigError(
            "clients.mode",
            f"= 'async' cannot be combined with run.method = {config.run.method!r}: without delayed momentum, stale "
            "changes diverge",
            got=config.clients.mode,
            allowed="'sync', or run.method = 'delayed'",
        )
    for key, got, good, allowed in (
        (
            "clients.merge",
            config.clients.merge,
            config.clients.merge == "mean",
            "'mean': one update a commit",
        ),
        ("clients.normalise", config.clients.normalise, config.clients.normalise == "received", "'received'"),
        (
            "clients.late",
            config.clients.late,
            config.clients.late == "drop",
            "'drop': every update is late here",
        ),
        (
            "compression.down",
            config.compression.down,
            config.compression.down in ("exact", "lossless"),
            "'exact', 'lossless': sites start from different versions",
        ),
        (
            "privacy.clip-norm",
            config.privacy.clip_norm,
            config.privacy.clip_norm == 0,
            "0: there is no sum to hide in",
        ),
    ):
        if not good:
            raise ConfigError(key, "cannot be used with clients.mode = 'async'", got=got, allowed=allowed)


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
    if clients.merge == "rda" and config.train.mode != "full":
        raise ConfigError(
            "clients.merge",
            "= 'rda' averages directions of whole tensors; the direction of a LoRA factor depends on its basis",
            got=f"train.mode = {config.train.mode!r}",
            allowed="train.mode = 'full', or another merge",
        )
    if clients.normalise == "fixed":
        raise ConfigError(
            "clients.normalise",
            f"= 'fixed' has no meaning with clients.merge = {clients.merge!r}",
            got=clients.normalise,
            allowed="'received'",
        )
