"""The four-part text of a `ModelError`: what is wrong, what was got, what is allowed, what to do."""

from __future__ import annotations

from typing import Any

from umbel.errors import ModelError


def model_error(problem: str, *, got: Any, allowed: str, remedy: str) -> ModelError:
    """Return (not raise) a `ModelError` whose message has all four parts."""
    return ModelError(f"{problem}, got {got!r}. Allowed: {allowed}. {remedy}")


def first_three(names: list[str]) -> str:
    """Return at most three names and how many more there are, for an error text."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more
