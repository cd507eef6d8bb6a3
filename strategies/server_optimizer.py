"""The server optimiser of a run, built from `server.*`, and the refusal where a method's basis moves.

The maths is in `strategies.aggregation.outer`. Moments are attached to coordinates, so a method that re-bases its
factors every round (SVD, stacking) or promises the exact mean (carry) takes none.
"""

from __future__ import annotations

from strategies.aggregation.outer import SGD, Adaptive, ServerOptimizer
from strategies.aggregation.rules.capabilities import Capabilities
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.models.names import BUFFER

RULES = {"fedadam": "adam", "fedyogi": "yogi", "fedadagrad": "adagrad"}


def check(config: Config, can: Capabilities) -> None:
    """Raise ConfigError when the method cannot carry a server optimiser."""
    if config.server.optimizer != "none" and not can.server_optimizer:
        raise ConfigError(
            "server.optimizer",
            f"cannot be used with run.method = {config.run.method!r}: its factors get a new basis every round, or "
            "must be the exact mean",
            got=config.server.optimizer,
            allowed="'none', or a method with a fixed basis",
            remedy="Use fedavg, fedit, ffa, rolora, fedsa, fedsb or ravan with a server optimiser.",
        )


def build(config: Config) -> ServerOptimizer | None:
    """Return the optimiser of `server.optimizer`, None for plain averaging."""
    s = config.server
    if s.optimizer == "none":
        return None
    if s.optimizer in RULES:
        return Adaptive(
            RULES[s.optimizer],  # type: ignore[arg-type]
            s.learning_rate,
            (s.beta1, s.beta2),
            s.tau if s.tau > 0 else "median",
            is_buffer=lambda name: name.startswith(BUFFER),
        )
    return SGD(
        s.learning_rate,
        s.momentum,
        s.optimizer == "nesterov",
        is_buffer=lambda name: name.startswith(BUFFER),
    )
