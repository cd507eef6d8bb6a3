"""Held-out sums of several sites as one measure.

    loss = sum_i loss_sum_i / sum_i tokens_i        perplexity = exp(loss)

Sums are added in canonical site order. A site whose sum is not finite is left out and counted: one NaN must not
hide the others' result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def combine(sums: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """Return loss, token_accuracy, perplexity, tokens and the sites' own losses; None when there is nothing."""
    good = {s: v for s, v in sorted(sums.items()) if v["tokens"] > 0 and math.isfinite(v["loss_sum"])}
    tokens = sum(v["tokens"] for v in good.values())
    if not tokens:
        return None
    loss = sum(v["loss_sum"] for v in good.values()) / tokens
    return {
        "loss": loss,
        "token_accuracy": sum(v["correct"] for v in good.values()) / tokens,
        "perplexity": math.exp(min(loss, 700.0)),
        "tokens": int(tokens),
        "excluded": len(sums) - len(good),
        "sites": {
            s: {"loss": v["loss_sum"] / v["tokens"], "tokens": int(v["tokens"])} for s, v in good.items()
        },
    }
