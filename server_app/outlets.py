"""Where a run is written down besides its event log: the ledger, the sinks, the /metrics endpoint.

Everything here is a copy or a proof of what the events say. The names of sinks are checked before a site is asked;
after that a failing sink or a full disk under the ledger is said loudly and costs the run nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbel.config import Config, to_flat
from umbel.ledger.book import Book
from umbel.telemetry import sinks
from umbel.telemetry.history import History

log = logging.getLogger("umbel.server")


class Outlets:
    """Closed until `open`; `close` is safe at any moment."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names: list[str] = []
        self._sinks: sinks.Sinks | None = None
        self._endpoint: Any = None
        self._book: Book | None = None
        self._run = ""
        self.history = History()

    def check(self) -> None:
        """Raise ConfigError for a sink that is none or not installed, or a port that cannot be listened on."""
        telemetry = self._config.telemetry
        self._names = sinks.chosen(telemetry.sinks)
        if telemetry.metrics_port:
            from umbel.telemetry.prometheus import serve_run

            self._endpoint = serve_run(telemetry.metrics_host, telemetry.metrics_port, lambda: self.history)

    def open(self, folder: Path, run: str, history: History, *, resumed_from: int | None) -> None:
        """Start for the run in `folder`."""
        self._run, self.history = run, history
        self._sinks = sinks.Sinks(self._names, folder, run, to_flat(self._config))
        try:
            self._book = Book(folder)
            self._book.resume(resumed_from or 0)
        except (OSError, KeyError, TypeError) as error:
            log.error("this run has no ledger: %s: %s", type(error).__name__, error)

    def take(self, event: Mapping[str, Any]) -> None:
        """Pass on one event; the history has it already."""
        if self._sinks is not None:
            self._sinks.take(event, self.history)

    def commit(self, record: Mapping[str, Any]) -> None:
        """Add a committed round to the ledger."""
        if self._book is None:
            return
        try:
            self._book.commit(self._run, record)
        except (OSError, KeyError, ValueError) as error:
            self._book = None
            log.error("the ledger ends here: %s: %s", type(error).__name__, error)

    def close(self, outcome: str) -> None:
        """Finish everything."""
        if self._sinks is not None:
            self._sinks.close(outcome)
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
