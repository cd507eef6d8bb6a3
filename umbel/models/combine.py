"""A method's state turned into one plain adapter that PEFT and others load: same logits, one pair of factors.

    s B A + C      ->  A = [s A; C_A],  B = [B, C_B]     scale 1 (alpha = rank)
    s B M A        ->  A,  B M                           scale s

The rank is the same for all layers (missing directions are zero), because servers of many adapters want one rank
and no pattern. Names decide what is there; nothing else of the method is needed, so an export needs no server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from umbel.exchange import CARRY_A, CARRY_B, CORE, SKETCH_OUT, A, B
from umbel.models.lora import LoraSettings, scale_of


def one_adapter(
    state: Mapping[str, np.ndarray], settings: LoraSettings
) -> tuple[dict[str, np.ndarray], LoraSettings]:
    """Return (arrays under PEFT's canonical names, settings) of one adapter with the logits of `state`.

    A state that is a plain adapter already comes back as it is, other tensors of it included; the basis of a
    sketch, which no forward pass uses, is left out.
    """
    modules = [name.removesuffix(A) for name in state if name.endswith(A)]
    cored = {m: _with_core(state, m) for m in modules if m + CORE in state}
    arrays = {
        name: value
        for name, value in state.items()
        if not name.endswith((CORE, CARRY_A, CARRY_B, SKETCH_OUT))
    }
    arrays.update({m + B: b for m, b in cored.items()})
    if not any(name.endswith(CARRY_A) for name in state):
        return arrays, settings
    rank = max(len(state[m + A]) + len(state[m + CARRY_A]) for m in modules)
    for m in modules:
        a, b = _stacked(arrays, state, m, scale_of(settings, m))
        arrays[m + A] = np.pad(a, ((0, rank - len(a)), (0, 0)))
        arrays[m + B] = np.pad(b, ((0, 0), (0, rank - len(a))))
    plain = dataclasses.replace(
        settings,
        rank=rank,
        alpha=float(rank),
        rslora=False,
        rank_pattern="",
        alpha_pattern="",
        dtype="float32",
    )
    return arrays, plain


def _with_core(state: Mapping[str, np.ndarray], module: str) -> np.ndarray:
    b, core = state[module + B].astype(np.float64), state[module + CORE].astype(np.float64)
    size = core.shape[1]
    parts = [b[:, h * size : (h + 1) * size] @ core[h] for h in range(len(core))]
    return np.concatenate(parts, axis=1).astype(state[module + B].dtype)


def _stacked(
    arrays: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray], module: str, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    a = np.concatenate([np.float32(scale) * arrays[module + A].astype(np.float32), state[module + CARRY_A]])
    b = np.concatenate([arrays[module + B].astype(np.float32), state[module + CARRY_B]], axis=1)
    return a.astype(np.float32), b.astype(np.float32)
