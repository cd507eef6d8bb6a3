"""A /metrics endpoint for Prometheus, off unless a port is given, on loopback unless an address is.

    start(host, port, table, values) -> Endpoint     values() yields (name, labels, value) at every scrape

Served by `prometheus-client` (extra `metrics`) in a daemon thread with a registry of its own: nothing of the process
itself is exported, and the library is imported only here. A scrape that fails is empty and logged; it ends nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from umbel.errors import ConfigError
from umbel.telemetry.gauges import GPU, SERVER, SITE, Gpus, Metric, Value, server_values, site_values
from umbel.telemetry.history import History

log = logging.getLogger("umbel.metrics")

LOOPBACK = "127.0.0.1"


class Endpoint:
    """A running endpoint; `port` is the one it listens on."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _Collector:
    """Turns (name, labels, value) into the library's families at every scrape."""

    def __init__(self, table: Mapping[str, Metric], values: Callable[[], Iterable[Value]]) -> None:
        self._table, self._values = table, values

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        families = {n: kinds[m.kind](n, m.help, labels=m.labels) for n, m in self._table.items()}
        try:
            for name, labels, value in self._values():
                families[name].add_metric([str(text) for text in labels], value)
        except Exception:
            log.warning("a scrape was cut short", exc_info=True)
        return iter(families.values())


def start(
    host: str, port: int, table: Mapping[str, Metric], values: Callable[[], Iterable[Value]]
) -> Endpoint:
    """Listen on host:port (0: a free one) and return the endpoint; ConfigError without the library or the port."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError(
            "telemetry.metrics-port",
            "needs the package prometheus-client, which is not installed",
            got=port,
            allowed="0 (off)",
            remedy="pip install 'umbel[metrics]'",
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(table, values))  # type: ignore[arg-type]
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            "telemetry.metrics-port",
            f"cannot be listened on ({error.strerror})",
            got=f"{host}:{port}",
            allowed="a free port",
        ) from None
    return Endpoint(server, thread)


def serve_run(host: str, port: int, history: Callable[[], History]) -> Endpoint:
    """Serve a run's numbers and the server's GPUs; `history` is asked at every scrape."""
    gpus = Gpus()

    def values() -> Iterator[Value]:
        yield from server_values(history(), time.time())
        yield from gpus.values()

    return start(host, port, {**SERVER, **GPU}, values)


def serve_sites(host: str, port: int, state_dirs: Iterable[Path]) -> Endpoint:
    """Serve the sites whose records lie in these state folders, and this machine's GPUs."""
    gpus, folders = Gpus(), list(state_dirs)

    def values() -> Iterator[Value]:
        for folder in folders:
            yield from site_values(folder, time.time())
        yield from gpus.values()

    return start(host, port, {**SITE, **GPU}, values)
