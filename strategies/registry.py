"""Names of methods, as `run.method` spells them."""

from __future__ import annotations

from collections.abc import Mapping

from compression import Layout
from strategies.base import UmbelStrategy
from strategies.carry import Carry, FedEx, FLoRA
from strategies.cores import FedSB, Ravan
from strategies.delayed import Delayed
from strategies.ecolora import EcoLoRA
from strategies.fedask import FedASK
from strategies.fedavg import FedAvg
from strategies.fedplora import FedPLoRA
from strategies.fedsa import FedSA
from strategies.ffa import FFA
from strategies.redistribute import FlexLoRA, HetLoRA, RaFLoRA
from strategies.rolora import RoLoRA
from strategies.sparseloco import SparseLoCo
from strategies.split import SplitFed
from umbel.config import Config

METHODS: dict[str, type[UmbelStrategy]] = {
    "fedavg": FedAvg,
    "fedit": FedAvg,
    "ffa": FFA,
    "rolora": RoLoRA,
    "carry": Carry,
    "flexlora": FlexLoRA,
    "fedex": FedEx,
    "flora": FLoRA,
    "fedsa": FedSA,
    "hetlora": HetLoRA,
    "raflora": RaFLoRA,
    "fedplora": FedPLoRA,
    "fedsb": FedSB,
    "ravan": Ravan,
    "fedask": FedASK,
    "ecolora": EcoLoRA,
    "sparseloco": SparseLoCo,
    "delayed": Delayed,
}


def build(config: Config, layout: Layout, scales: Mapping[str, float]) -> UmbelStrategy:
    """Return the method named by `run.method`, checked against the configuration."""
    if config.run.task == "split":
        return SplitFed(config, layout, scales)
    return METHODS[config.run.method](config, layout, scales)
