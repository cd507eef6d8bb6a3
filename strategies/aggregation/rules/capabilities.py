"""What a rule can live with, and the refusal when a run needs more.

A rule that moves the base cannot be used on a quantised base (re-quantisation destroys the folded update) nor
with a pinned preference reference (the reference would move along).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from umbel.errors import ConfigError


@dataclass(frozen=True)
class Capabilities:
    """Flags of one rule. `dora`: (A, B, magnitude) averaged with the error reported, trained in phases, or refused.

    `server_optimizer`: the basis of the factors is fixed and no exact mean is promised, so moments make sense.
    """

    heterogeneous_rank: bool = False
    secure_sums: bool = False
    dp_linear: bool = False
    moves_base: bool = False
    safe_4bit: bool = True
    stale_updates: bool = True
    global_model: bool = True
    dora: Literal["refuse", "average", "phases"] = "refuse"
    exact: bool = False
    server_optimizer: bool = False
    joiner_needs: str = "the current state"
    note: str = ""


@dataclass(frozen=True)
class Needs:
    """What a run asks of its rule."""

    heterogeneous_rank: bool = False
    secure_sums: bool = False
    dp_linear: bool = False
    quantised_base: bool = False
    fixed_reference: bool = False
    stale_updates: bool = False
    dora: bool = False


def check(rule: str, can: Capabilities, needs: Needs) -> None:
    """Raise ConfigError naming rule, key and alternative for the first need that `rule` does not meet."""
    table = (
        ("heterogeneous_rank", can.heterogeneous_rank, "cannot combine different ranks", "flexlora or carry"),
        ("secure_sums", can.secure_sums, "needs single updates, not their sum", "ffa, rolora or fedask"),
        ("dp_linear", can.dp_linear, "is not linear in what a site sends", "ffa, fedsb or fedask"),
        ("quantised_base", can.safe_4bit and not can.moves_base, "would fold into a quantised base", "carry"),
        ("fixed_reference", not can.moves_base, "would move the reference model", "carry"),
        ("stale_updates", can.stale_updates, "re-bases or alternates factors every round", "fedit or ffa"),
        ("dora", can.dora != "refuse", "has no known right way with DoRA", "fedit, or plain LoRA"),
    )
    for key, met, problem, alternative in table:
        if getattr(needs, key) and not met:
            raise ConfigError(
                f"rule {rule}",
                f"{problem} ({key})",
                got=key,
                allowed=f"a rule with {key}",
                remedy=f"Use {alternative}.",
            )
