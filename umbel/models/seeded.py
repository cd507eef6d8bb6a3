"""Arrays that both ends draw instead of sending: a pure function of the run's seed and a layer's name.

    first A       the adapter's own start                       frozen A of FFA
    heads         A ~ N(0, 1/in), B ~ N(0, 1/out)               frozen factors around trained cores
    probe         O [in, k] ~ N(0, 1)                           a sketch's random matrix

Counter-based streams in float32: neither device nor order nor dtype changes them. What is drawn is compared by
hash before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from umbel.exchange import A, B, Exchange
from umbel.models.adapter import initial_adapter
from umbel.models.lora import LoraSettings
from umbel.models.state import numpy_dtype
from umbel.seeds import generator


def seeded_factors(
    modules: Iterable[Any], settings: LoraSettings, seed: int, exchange: Exchange
) -> dict[str, np.ndarray]:
    """Return the factors of `exchange.seeded` for all modules, in the adapter's dtype."""
    modules = list(modules)
    drawn = (
        draw_heads(modules, settings, seed)
        if exchange.down.cores
        else initial_adapter(modules, settings, seed)
    )
    wanted = tuple({"A": A, "B": B}[f] for f in exchange.seeded)
    return {name: array for name, array in drawn.items() if wanted and name.endswith(wanted)}


def draw_heads(modules: Iterable[Any], settings: LoraSettings, seed: int) -> dict[str, np.ndarray]:
    """Return normal A [r, in] of variance 1/in and B [out, r] of variance 1/out for every module."""
    dtype, found = numpy_dtype(settings.dtype), {}
    for m in modules:
        a = generator(seed, "ravan", m.name, "A").standard_normal((m.rank, m.in_features), dtype=np.float32)
        b = generator(seed, "ravan", m.name, "B").standard_normal((m.out_features, m.rank), dtype=np.float32)
        found[m.name + A] = (a / np.float32(math.sqrt(m.in_features))).astype(dtype)
        found[m.name + B] = (b / np.float32(math.sqrt(m.out_features))).astype(dtype)
    return found


def probe(run_seed: int, round_index: int, module: str, num_inputs: int, num_columns: int) -> np.ndarray:
    """Return O [in, k], standard normal float32 of a counter-based stream: the same at every site and server."""
    drawn = generator(run_seed, "fedask", round_index, module)
    return drawn.standard_normal((num_inputs, num_columns), dtype=np.float32)
