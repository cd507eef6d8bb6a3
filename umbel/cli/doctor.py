"""`umbel doctor`: is this machine, and this recipe on it, fit to run? Every WARN and FAIL says what to do.

With a role and the settings of a deployed service it looks at that service too: profile, certificates, keys, network,
clock, rows, policy (`umbel.doctor`).
"""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Iterable
from pathlib import Path

from umbel.doctor.profile import SERVER, SITE
from umbel.doctor.recipe import recipe_checks as recipe_checks
from umbel.doctor.roles import GROUPS, role_checks
from umbel.doctor.settings import read_settings
from umbel.errors import ConfigError
from umbel.telemetry.machine import FAIL, PASS, WARN, Check, machine_checks
from umbel.telemetry.units import one_line

_WIDTH = 18


def doctor(
    config_path: str | os.PathLike[str] | None = None,
    json: bool = False,
    *,
    role: str = "",
    settings: str | os.PathLike[str] = "",
    only: Iterable[str] = (),
) -> int:
    """Print the findings and return 0, or 1 when one of them is a FAIL.

    `config_path` names a recipe whose model and data are checked too; `json` prints one object, no text. `role` is
    server or site, `settings` the service's file of NAME=value lines (its values stand for this process's
    environment, as they do for the service), `only` the groups of checks that are wanted.
    """
    path = Path(config_path) if config_path is not None else None
    if not role:
        if settings or only:
            raise ConfigError("--role", "is needed with --settings and --only", allowed=f"{SERVER} or {SITE}")
        checks = [*machine_checks()]
        if path is not None:
            checks += recipe_checks(path)
    else:
        checks = list(role_checks(_known_role(role), _given(settings), path, _groups(only)))
    failed = any(check.status == FAIL for check in checks)
    if json:
        print(jsonlib.dumps({"ok": not failed, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        print(render(checks))
    return int(failed)


def _known_role(role: str) -> str:
    if role not in (SERVER, SITE):
        raise ConfigError("--role", "is not one of the roles", got=role, allowed=f"{SERVER} or {SITE}")
    return role


def _groups(only: Iterable[str]) -> tuple[str, ...]:
    for name in (wanted := tuple(only)):
        if name not in GROUPS:
            raise ConfigError("--only", "is not a group of checks", got=name, allowed=", ".join(GROUPS))
    return wanted


def _given(settings: str | os.PathLike[str]) -> dict[str, str]:
    """Return the service's environment: this process's, with the file's settings over it."""
    if settings:
        os.environ.update(read_settings(Path(settings)))
    return dict(os.environ)


def render(checks: list[Check]) -> str:
    """The block of findings as plain text, a count of each at the end."""
    lines = []
    for check in checks:
        lines.append(f"{check.status}  {check.name:<{_WIDTH}} {one_line(check.found)}")
        if check.remedy and check.status != PASS:
            lines.append(f"      {'':<{_WIDTH}} -> {one_line(check.remedy)}")
    counts = {status: sum(c.status == status for c in checks) for status in (PASS, WARN, FAIL)}
    lines.append(", ".join(f"{number} {status}" for status, number in counts.items()))
    return "\n".join(lines)
