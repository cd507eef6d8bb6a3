"""SparseLoCo: sparse changes with error feedback at the sites, which takes the place of outer momentum.

    site      e <- beta e + delta;   c = Q(top-k(e));   e <- e - c
    server    theta <- theta + alpha sum_i w_i c_i / sum_i w_i        over all accepted sites

(Sarfi et al. 2025, arXiv 2508.15706.) A coordinate that a site did not send counts as zero of that site: dividing by
those that sent it is another rule. beta is `compression.feedback` (0.95), k of 4096 and the values are
`compression.up` ('topk(4096,64)|sign2|rice'), alpha is `server.learning-rate`. The decayed residual is a momentum;
a second one at the server counts the same mass twice, hence it is refused here whatever its size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compression.payload import is_exact
from strategies.aggregation.outer import SGD
from strategies.fedavg import FedAvg
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.models.names import BUFFER


class SparseLoCo(FedAvg):
    """FedAvg of what the residuals let through, with the outer rate alpha."""

    name = "sparseloco"
    capabilities = replace(FedAvg.capabilities, server_optimizer=False, stale_updates=False)

    def __init__(self, config: Config, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        if config.server.learning_rate != 1.0:
            self.outer = SGD(config.server.learning_rate, is_buffer=lambda name: name.startswith(BUFFER))

    def check(self, config: Config) -> None:
        """Refuse a run without residual, with an exact codec, or with an outer optimiser of its own."""
        c = config.compression
        if is_exact(c.up) or c.feedback <= 0:
            raise ConfigError(
                "compression.feedback",
                "must be above 0, with a lossy compression.up, for run.method = 'sparseloco': its residual is the "
                "momentum",
                got=f"feedback {c.feedback:g}, up {c.up!r}",
                allowed="for example feedback 0.95 and up 'topk(4096,64)|sign2|rice'",
                remedy="Use run.method = 'fedavg' with server.optimizer = 'nesterov' for DiLoCo without a residual.",
            )
        if config.server.optimizer != "none":
            raise ConfigError(
                "server.optimizer",
                "has no place in run.method = 'sparseloco': the residual at the sites is the momentum already, and a "
                "second one counts the same mass twice",
                got=f"{config.server.optimizer!r} with momentum {config.server.momentum:g}",
                allowed="'none'; server.learning-rate is the outer rate alpha",
            )
        super().check(config)
