"""Recipes: which codec goes with which residual decay and which outer optimiser. A table, not free
combinations.

A decayed residual *is* a momentum; adding outer momentum to it counts the same mass twice. `check` refuses
what is known to be wrong, in words, and warns about what is not known to be right. The evidence is from toy
models, one seed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from compression.api import check_policy
from compression.bounds import Exact, may_carry_residual
from compression.codecs.randk import RandKCodec
from compression.codecs.token import TokenCodec
from compression.codecs.topk import TopKCodec
from compression.feedback import refuse_residual
from compression.registry import build
from umbel.errors import ConfigError

KEY = "compression"


@dataclass(frozen=True)
class Recipe:
    """`decay` is None without a residual; `max_momentum` is the largest outer momentum it was found to
    bear."""

    name: str
    policy: str
    decay: float | None
    max_momentum: float
    note: str


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("exact", "exact", None, 1.0, "as it is"),
        Recipe("dense", "bf16", None, 1.0, "reference"),
        Recipe("lossless", "lossless", None, 1.0, "reference, every bit"),
        Recipe("int8", "int8(256,rtn)", None, 1.0, "equal to dense within noise"),
        Recipe("int4", "int4(64,rtn)", None, 1.0, "about free"),
        Recipe("rot", "had(4096)|lm4(unbiased)", None, 1.0, "equal to dense within noise"),
        Recipe("ecsq-high", "ecsq(rate=2.0)", None, 1.0, "equal to dense within noise"),
        Recipe("rot2-ef", "had(4096)|lm2", 0.95, 0.0, "residual instead of momentum"),
        Recipe("sparse", "topk(4096,64)|sign2|rice", 0.95, 0.0, "residual instead of momentum"),
        Recipe("sparse128", "topk(4096,128)|sign2|rice", 0.95, 0.0, "residual instead of momentum"),
        Recipe("ecsq-low", "ecsq(rate=0.263)", 0.95, 0.0, "residual instead of momentum"),
        Recipe("sign-ef", "sign(4096)", 1.0, 0.0, "small fixture only"),
        Recipe("int2-ef", "int2(256,rtn)", 1.0, 0.5, "tiny runs only; .7 after a warm start"),
    )
}


def recipe(name: str) -> Recipe:
    """A recipe by name. Raises ConfigError with the list."""
    if name not in RECIPES:
        raise ConfigError(f"{KEY}.recipe", "is unknown", got=name, allowed=", ".join(RECIPES))
    return RECIPES[name]


def check(
    policy: str,
    *,
    residual: bool,
    momentum: float = 0.0,
    pretraining: bool = False,
    activations: bool = False,
    secure_sum: bool = False,
    force: bool = False,
) -> list[str]:
    """Warnings for a legal combination; raises ConfigError for one that is refused (unless `force`, then a
    warning).

    `momentum` is the outer optimiser's, `residual` whether error feedback is on, `activations` for split
    learning.
    """
    parsed = check_policy(policy)
    codecs = [build(pipeline) for _, pipeline in parsed.rules]
    if residual:
        refuse_residual(parsed)  # unsound whatever the user wants: force does not help
    refused: list[tuple[str, str]] = []
    if residual and momentum >= 0.9:
        refused.append(
            (
                f"keeps a residual under outer momentum {momentum:g}: both are momenta, the mass counts twice",
                "Set outer momentum to 0 (the residual replaces it), or switch the residual off.",
            )
        )
    if not residual and any(isinstance(codec, TopKCodec) for codec in codecs):
        refused.append(("sends top-k without a residual: what is dropped is lost", "Switch the residual on."))
    per_token = [role for role, pipeline in parsed.rules if isinstance(build(pipeline), TokenCodec)]
    if not activations and {*per_token} - {"activation", "act_grad"}:
        refused.append(
            (
                "scales every token by itself, which weights and their changes do not have",
                "Use int8(256,rtn); tok8 is for activations.",
            )
        )
    if pretraining and any(isinstance(codec, RandKCodec) for codec in codecs):
        refused.append(("uses random-k for pretraining, which cost .47 nats", "Use topk, ecsq or int4."))
    if activations and residual:
        refused.append(
            ("keeps a residual on activations: the next batch is other data", "Switch the residual off.")
        )
    if secure_sum and not all(isinstance(codec, RandKCodec) for codec in codecs):
        refused.append(
            (
                "cannot be summed under masks: per-site scales, supports or entropy codes do not add",
                "Use the integer codec of compression.secure_sum.",
            )
        )
    notes = _warnings(codecs, residual, momentum)
    for problem, remedy in refused:
        if not force:
            raise ConfigError(KEY, problem, got=policy, remedy=remedy)
        notes.append(f"forced: {policy} {problem}")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return notes


def _warnings(codecs: list, residual: bool, momentum: float) -> list[str]:
    notes = []
    if residual and 0.5 < momentum < 0.9:
        notes.append(f"a residual under outer momentum {momentum:g} is not known to be sound; 0 to 0.5 is")
    if residual and all(isinstance(codec.bound, Exact) for codec in codecs):
        notes.append("error feedback has no effect: every codec of this policy is exact")
    if not residual and any(_weak_without_residual(codec) for codec in codecs):
        notes.append("this codec loses much of each update; with a residual the loss comes back later")
    return notes


def _weak_without_residual(codec: object) -> bool:
    bits = getattr(codec, "bits", 16)
    return may_carry_residual(codec.bound) and (type(codec).__name__ == "SignCodec" or bits == 2)  # type: ignore[attr-defined]
