"""Fed-PLoRA: R parallel rank-one modules; a site trains some of them.

    D = s sum_j b_j a_j^T;   module j <- mean over the sites that trained j;   the others keep their value

arXiv 2602.16936 (from its abstract; the published selection schedule is not known). A site holds two adapters
of one scale: "rest", frozen, and "selected", trained - no folding into the base, hence safe with 4 bits.
Averaging b_j and a_j apart keeps FedIT's bias inside each rank-one module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.mean import check_weight
from strategies.aggregation.rules.capabilities import Capabilities
from strategies.aggregation.rules.common import Factors

CAPABILITIES = Capabilities(
    heterogeneous_rank=True,
    secure_sums=True,
    joiner_needs="all modules, its selection",
    note="sums per module",
)


class ModuleUpdate(NamedTuple):
    """One site: the module indices it trained (ascending), A [k, in] and B [out, k] in that order."""

    site: str
    weight: float
    selected: Sequence[int]
    a: np.ndarray
    b: np.ndarray


class Modules(NamedTuple):
    """All R modules, and per module how many sites trained it."""

    factors: Factors
    coverage: np.ndarray


def select(
    num_modules: int, num_trained: int, position: int, round_index: int, cohort_size: int = 1
) -> list[int]:
    """Return the modules that the site at `position` of the sorted cohort trains in this round.

    A window of `num_trained` that moves on by itself for every position and round, so that ceil(R / k) steps
    cover all modules. Rounds count from 1.
    """
    start = ((round_index - 1) * cohort_size + position) * num_trained
    return sorted((start + j) % num_modules for j in range(num_trained))


def split(factors: Factors, selected: Sequence[int]) -> tuple[Factors, Factors]:
    """Return (rest, selected); their products add up to the whole."""
    rest = [j for j in range(len(factors.a)) if j not in set(selected)]
    return (
        Factors(factors.a[rest], factors.b[:, rest]),
        Factors(factors.a[list(selected)], factors.b[:, list(selected)]),
    )


def aggregate(previous: Factors, updates: Iterable[ModuleUpdate]) -> Modules:
    """Return the modules after the round in float64; those nobody trained keep their bits.

    Raises UpdateError for a module index that does not exist or factors that do not match the selection.
    """
    kept = sorted((u for u in updates if check_weight(u.weight) > 0), key=lambda u: u.site)
    num = len(previous.a)
    a, b = np.zeros(previous.a.shape), np.zeros(previous.b.shape)
    weight, count = np.zeros(num), np.zeros(num, np.int64)
    for update in kept:
        index = _checked(update, num)
        a[index] += update.weight * update.a.astype(np.float64)
        b[:, index] += update.weight * update.b.astype(np.float64)
        weight[index] += update.weight
        count[index] += 1
    safe, trained = np.where(count > 0, weight, 1.0), count > 0
    a = np.where(trained[:, None], a / safe[:, None], previous.a)
    b = np.where(trained, b / safe, previous.b)
    return Modules(Factors(a, b), count)


def _checked(update: ModuleUpdate, num_modules: int) -> list[int]:
    index = list(update.selected)
    if len(set(index)) != len(index) or not all(0 <= j < num_modules for j in index):
        raise UpdateError(f"site {update.site!r}", "trained modules that do not exist", got=index)
    if len(update.a) != len(index) or update.b.shape[1] != len(index):
        raise UpdateError(f"site {update.site!r}", "sent other modules than it says", got=len(update.a))
    return index
