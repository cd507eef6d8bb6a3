"""What a run must be for `privacy.*` to mean what it says: every other combination is refused, in words.

The guarantee is that of a sum to which each site adds at most C in L2 norm. Whatever lets one site's content change
what *another* site adds (weights, norm filters, robust rules, replacement of a refused update) breaks that bound.
"""

from __future__ import annotations

from typing import Any

from umbel.config.schema import Config
from umbel.errors import ConfigError

# Methods whose next state is the plain mean of what travels, tensor by tensor.
PLAIN_MEANS = ("fedavg", "fedit", "ffa", "rolora")


def check_privacy(config: Config) -> None:
    """Raise ConfigError naming the setting that does not go with `privacy.clip-norm` > 0, and what to set instead."""
    privacy = config.privacy
    if privacy.clip_norm <= 0 and privacy.noise_multiplier <= 0 and privacy.budget_epsilon <= 0:
        return
    if privacy.clip_norm <= 0:
        name = "noise-multiplier" if privacy.noise_multiplier > 0 else "budget-epsilon"
        raise ConfigError(
            f"privacy.{name}",
            "has no meaning without privacy.clip-norm: noise is measured in units of what one site may add",
            got=privacy.noise_multiplier if privacy.noise_multiplier > 0 else privacy.budget_epsilon,
            allowed="0, or privacy.clip-norm > 0",
            remedy="Set privacy.clip-norm to about the median norm of the updates (`norm` in the event log).",
        )
    if privacy.noise_multiplier <= 0:
        raise ConfigError(
            "privacy.noise-multiplier",
            "is 0 while privacy.clip-norm is set: clipping without noise is no privacy",
            got=privacy.noise_multiplier,
            allowed="> 0",
            remedy="Values around 1 are usual; set privacy.clip-norm = 0 to switch privacy off.",
        )
    for name, good, got, allowed, why in _table(config):
        if not good:
            remedy = f"Set {name} to what is allowed, or privacy.clip-norm and noise-multiplier to 0."
            raise ConfigError(
                name, f"does not go with privacy.*: {why}", got=got, allowed=allowed, remedy=remedy
            )


def _table(config: Config) -> list[tuple[str, bool, Any, str, str]]:
    """Return (key, whether it is right, its value, what is right, why), one row a condition."""
    c, method = config.clients, config.run.method
    cohort = c.goal == 0 or c.over_provision == 1.0
    feedback, kept = config.compression.feedback, config.telemetry.keep_updates
    return [
        (
            "run.method",
            method in PLAIN_MEANS,
            method,
            " | ".join(repr(m) for m in PLAIN_MEANS),
            "its next state is not the plain mean of what the sites send",
        ),
        (
            "clients.normalise",
            c.normalise == "fixed",
            c.normalise,
            "'fixed'",
            "the sum must be divided by a number that does not depend on who answered",
        ),
        ("clients.late", c.late == "drop", c.late, "'drop'", "a late update would count in a second release"),
        (
            "clients.weighting",
            c.weighting == "uniform",
            c.weighting,
            "'uniform'",
            "a weight would multiply what one site may add",
        ),
        (
            "clients.merge",
            c.merge == "mean",
            c.merge,
            "'mean'",
            "a robust rule lets one site change what another one counts",
        ),
        (
            "clients.max-norm-ratio",
            c.max_norm_ratio == 0,
            c.max_norm_ratio,
            "0 (every update is clipped anyway)",
            "a filter by the median of norms lets one site decide whether another one counts",
        ),
        (
            "clients.over-provision",
            cohort,
            c.over_provision,
            "1.0, or clients.goal = 0",
            "a refused update would be replaced by another site's",
        ),
        (
            "compression.feedback",
            feedback == 0,
            feedback,
            "0",
            "a residual carries what was clipped off past the bound",
        ),
        (
            "telemetry.keep-updates",
            not kept,
            kept,
            "false",
            "it stores the very updates that the noise is to hide",
        ),
    ]
