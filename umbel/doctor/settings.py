"""The settings of a deployed server or site: the file that systemd, Docker Compose and the doctor all read.

NAME=value lines, `#` comments, values optionally in single or double quotes (docs/deployment.md lists the names).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbel.errors import ConfigError

_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*$")
_PAIR = re.compile(r'([A-Za-z0-9_-]+)=(?:"([^"]*)"|([^\s"]+))')


def read_settings(path: Path) -> dict[str, str]:
    """Return NAME -> value; raises ConfigError for a file that cannot be read and for a line that is none."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(
            "--settings",
            f"cannot be read ({why})",
            got=str(path),
            remedy="Start from a file of deploy/profiles.",
        ) from None
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise ConfigError(
                "--settings", f"line {number} is no setting", got=line.strip()[:60], allowed="NAME=value"
            )
        value = match[2]
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[match[1]] = value
    return found


def node_facts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the pairs of UMBEL_NODE_CONFIG: what the site's process is told."""
    text = str(settings.get("UMBEL_NODE_CONFIG", ""))
    return {name: quoted or bare for name, quoted, bare in _PAIR.findall(text)}
