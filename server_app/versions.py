"""Do the sites run what the server runs? A differing minor version is a warning that names it, not a refusal.

Adapters of two peft or transformers versions usually fit, and when they do not, the fingerprints at join say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umbel import __version__
from umbel.telemetry.environment import versions

COMPARED = ("umbel", "flwr", "torch", "transformers", "peft")


def own_versions() -> dict[str, str]:
    """Return the server's versions of the packages that are compared."""
    installed = versions(COMPARED[1:])
    return {"umbel": __version__, **{name: v for name, v in installed.items() if v}}


def differences(site: Mapping[str, Any] | None, server: Mapping[str, str]) -> list[str]:
    """Return 'package: site has A, server has B' where major or minor version differ."""
    found = []
    for package in COMPARED:
        theirs, ours = str((site or {}).get(package, "")), server.get(package, "")
        if theirs and ours and theirs.split(".")[:2] != ours.split(".")[:2]:
            found.append(f"{package}: site has {theirs[:32]}, server has {ours}")
    return found
