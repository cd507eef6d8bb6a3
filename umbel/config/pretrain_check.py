"""Settings of full pretraining (`run.task = "pretrain"`) that are right one by one and wrong together."""

from __future__ import annotations

from typing import Any

from umbel.config.schema import Config
from umbel.errors import ConfigError

SCRATCH = "config:"


def check_pretrain(config: Config) -> None:
    """Raise ConfigError naming key, value, what is allowed and what to do."""
    train, pretrains = config.train, config.run.task == "pretrain"
    if not pretrains:
        _only_in_pretraining(config)
        return
    if train.mode != "full":
        _refuse("train.mode", "must be 'full' with run.task = 'pretrain'", train.mode, "'full'")
    if config.model.dtype != "float32":
        _refuse(
            "model.dtype",
            "must be 'float32' with run.task = 'pretrain': small steps vanish in bfloat16 weights",
            config.model.dtype,
            "'float32', with train.precision = 'bf16' for bfloat16 products",
        )
    if train.optimizer == "adamw8bit" and train.optimizer_state == "keep":
        _refuse(
            "train.optimizer-state",
            "= 'keep' is not defined for the codes of 8-bit moments",
            train.optimizer_state,
            "'reset', or train.optimizer = 'adamw' or 'muon'",
        )
    if train.sharding == "fsdp" and train.optimizer_state == "keep":
        _refuse(
            "train.optimizer-state",
            "= 'keep' is not there for sharded moments (train.sharding = 'fsdp')",
            train.optimizer_state,
            "'reset', or train.sharding = 'ddp'",
        )
    if train.sharding == "fsdp" and train.optimizer == "muon":
        _refuse("train.optimizer", "needs whole matrices on every process", "muon", "'adamw' with 'fsdp'")
    if config.data.leases == "server":
        for key, got, good, allowed in (
            ("clients.mode", config.clients.mode, config.clients.mode == "sync", "'sync'"),
            ("clients.late", config.clients.late, config.clients.late == "drop", "'drop'"),
        ):
            if not good:
                _refuse(key, "cannot be combined with data.leases = 'server'", got, allowed)


def _only_in_pretraining(config: Config) -> None:
    for key, got, default in (
        ("train.optimizer", config.train.optimizer, "adamw"),
        ("train.compile", config.train.compile, "off"),
        ("train.round-seconds", config.train.round_seconds, 0.0),
        ("train.processes", config.train.processes, 1),
        ("data.leases", config.data.leases, "site"),
        ("model.tokenizer", config.model.tokenizer, ""),
    ):
        if got != default:
            _refuse(key, "has no effect without run.task = 'pretrain'", got, f"{default!r}")
    if config.model.name.startswith(SCRATCH):
        _refuse(
            "model.name",
            "names a model without weights, which only run.task = 'pretrain' can start from",
            config.model.name,
            "a model with weights",
        )


def _refuse(key: str, problem: str, got: Any, allowed: str) -> None:
    raise ConfigError(key, problem, got=got, allowed=allowed)
