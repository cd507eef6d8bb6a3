"""The role of a tensor by its name: one function, so that both sides compute the same layout."""

from __future__ import annotations

from compression.layout import Role
from umbel.models.names import role_of


def role_for(name: str) -> Role:
    """Return the role of an exchanged tensor (`umbel.models.names.role_of`)."""
    return Role[role_of(name).upper()]
