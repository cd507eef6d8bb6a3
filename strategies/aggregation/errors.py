"""The error of an update that cannot enter a sum.

It is raised *before* anything was added, so whoever catches it may drop the update, name the site and go on:
the accumulator still holds exactly the sites accepted so far.
"""

from __future__ import annotations

from typing import Any

from umbel.errors import UmbelError


class UpdateError(UmbelError):
    """One site's update is unusable (name, shape, dtype, weight or a non-finite value)."""

    def __init__(
        self, name: str, problem: str, *, got: Any = None, allowed: str = "", remedy: str = ""
    ) -> None:
        self.name, self.problem, self.got = name, problem, got
        text = f"{name} {problem}" + (f", got {got!r}" if got is not None else "") + "."
        text += f" Allowed: {allowed}." if allowed else ""
        text += f" {remedy or 'Drop this update; nothing of it was added.'}"
        super().__init__(text)
