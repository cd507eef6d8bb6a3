"""Asynchronous training: every arrival moves the model at once, by delayed Nesterov.

One update a commit (`clients.mode = "async"`). Its change was made from the state its site was sent s commits ago; it
is applied to the present one with the weight 1 / (1 + server.stale-decay s), and refused beyond server.stale-limit.
The rule, and DyLU, which gives slow sites fewer steps (`server.dylu`): `strategies.outer.delayed`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from strategies.aggregation.dtypes import kind_of
from strategies.base import Outcome, SiteUpdate, UmbelStrategy
from strategies.fedavg import FedAvg
from strategies.outer.delayed import DelayedNesterov, dylu_steps
from strategies.outer.weights import stale_factor
from umbel.config import Config
from umbel.errors import ConfigError

log = logging.getLogger("umbel.strategy")


class Delayed(UmbelStrategy):
    """Delayed Nesterov; the engine says whose turn it is (`turn`) and how old each update's base is (`ages`)."""

    name = "delayed"
    capabilities = replace(FedAvg.capabilities, server_optimizer=False, secure_sums=False)

    def __init__(self, config: Config, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        s = config.server
        self.rule = DelayedNesterov(s.learning_rate, s.momentum, s.delay)
        self.turn = ""
        self.ages: dict[str, int] = {}
        # Optimiser steps a second, newest measurement of each site.
        self.speeds: dict[str, float] = {}

    def check(self, config: Config) -> None:
        """Refuse waiting for all sites, and warn where training starts from random weights."""
        if config.clients.mode != "async":
            raise ConfigError(
                "clients.mode",
                "must be 'async' for run.method = 'delayed': with all sites waited for, plain Nesterov is the rule",
                got=config.clients.mode,
                allowed="'async'",
                remedy="Use run.method = 'fedavg' with server.optimizer = 'nesterov' for rounds.",
            )
        if config.server.optimizer != "none":
            raise ConfigError(
                "server.optimizer",
                "has no place in run.method = 'delayed', which is an outer rule itself",
                got=config.server.optimizer,
                allowed="'none'; server.learning-rate, server.momentum and server.delay are its settings",
            )
        super().check(config)
        if config.model.name.startswith("builtin:") and config.train.mode == "full":
            log.warning(
                "asynchronous training from random weights: published runs ended 28 %% to 123 %% worse in perplexity "
                "than in step, and 7 %% after a warm phase in step; consider starting from a checkpoint"
            )

    def directives(self, commits: int) -> dict[str, Any]:
        """As the base, with the position that one site is at when all have done the same share."""
        steps, sites = self.config.train.local_steps, max(1, self.config.clients.minimum)
        found = super().directives(commits)
        if self.config.server.dylu and self.turn in self.speeds:
            found["local_steps"] = dylu_steps(steps, self.speeds)[self.turn]
        found["first_step"] = commits * steps // sites
        found["total_steps"] = -(-self.config.run.rounds * steps // sites)
        return found

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Apply each update in turn; its arrays are the present state plus its change."""
        moved, ages = dict(state), {}
        for update in updates:
            age = self.ages.get(update.site, 0)
            factor = stale_factor(age, self.config.server.stale_decay, self.config.server.stale_limit)
            delta = {
                name: update.arrays[name].astype(np.float64) - value.astype(np.float64)
                if kind_of(value.dtype) == "floating"
                else update.arrays[name]
                for name, value in state.items()
            }
            moved = self.rule.arrive(moved, delta, factor)
            ages[update.site] = age
        return Outcome(moved, {"staleness": ages, "arrivals_gathered": self.rule.arrivals})

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return A, m and the count of arrivals."""
        return self.rule.state_dict()

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""
        self.rule.load_state_dict(arrays)
