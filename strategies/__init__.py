"""The methods: what the server does with the updates of a round, one method a file.

Names are looked up when they are used: the maths in `strategies.aggregation` must not pull Flower in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.base import Order, Outcome, Seat, SiteUpdate, UmbelStrategy
    from strategies.registry import METHODS, build

__all__ = ["METHODS", "Order", "Outcome", "Seat", "SiteUpdate", "UmbelStrategy", "build"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = "strategies.registry" if name in ("METHODS", "build") else "strategies.base"
    return getattr(importlib.import_module(home), name)
