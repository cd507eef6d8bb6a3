"""What the operator of the server decides about sites while a run goes on: `operator.toml` in the run folder.

    pin   = ["clinic"]     asked in every round it is online, whatever its strikes
    ban   = ["kitchen"]       not asked at all
    unban = ["workshop"]     strikes and quarantine forgotten, once, when this file is saved

Read at the opening of every round. A file that cannot be read changes nothing and is said loudly; it never ends
a run. A name in both `pin` and `ban` is banned.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("umbel.server")


@dataclass(frozen=True)
class Orders:
    """Names of sites by order."""

    pin: frozenset[str] = frozenset()
    ban: frozenset[str] = frozenset()
    unban: frozenset[str] = frozenset()


class Operator:
    """Reads the file when it has changed; `orders` is what holds now."""

    def __init__(self, path: Path | None, on_event: Callable[..., None]) -> None:
        self._path, self._event = path, on_event
        self._seen: bytes | None = None
        self.orders = Orders()

    def read(self) -> frozenset[str]:
        """Take in the file and return the sites to unban now (empty when the file has not changed)."""
        if self._path is None:
            return frozenset()
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            log.warning("%s could not be read and changes nothing: %s", self._path.name, error)
            return frozenset()
        if data == (self._seen or b""):
            return frozenset()
        self._seen = data
        try:
            self.orders = parse(data.decode("utf-8"))
        except ValueError as error:
            log.warning("%s changes nothing: %s", self._path.name, error)
            self._event("operator_ignored", reason=str(error)[:300])
            return frozenset()
        fields = {k: sorted(getattr(self.orders, k)) for k in ("pin", "ban", "unban")}
        self._event("operator", **fields)
        log.info("operator: %s", ", ".join(f"{k} {v}" for k, v in fields.items() if v) or "no orders")
        return self.orders.unban


def parse(text: str) -> Orders:
    """Return the orders of the file's text; raises ValueError in words."""
    table: dict[str, Any] = tomllib.loads(text)
    unknown = sorted(set(table) - {"pin", "ban", "unban"})
    if unknown:
        raise ValueError(f"unknown entries {unknown}; allowed are pin, ban and unban")
    for key, names in table.items():
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise ValueError(f"{key} must be a list of site names, got {names!r}")
    return Orders(**{key: frozenset(names) for key, names in table.items()})
