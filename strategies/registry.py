"""Names of methods, as `run.method` spells them."""

from __future__ import annotations

from collections.abc import Mapping

from compression import Layout
from strategies.base import UmbelStrategy
from strategies.fedavg import FedAvg
from umbel.config import Config

METHODS: dict[str, type[UmbelStrategy]] = {"fedavg": FedAvg, "fedit": FedAvg}


def build(config: Config, layout: Layout, scales: Mapping[str, float]) -> UmbelStrategy:
    """Return the method named by `run.method`, checked against the configuration."""
    return METHODS[config.run.method](config, layout, scales)
