"""The faulty link used by the scenarios: each fault does what it says, seen from both ends of a plain socket."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from support.proxy import Proxy

pytestmark = pytest.mark.fault


class Echo(threading.Thread):
    """Answers every byte it gets and notes when the other side says that it is done."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                try:
                    while data := connection.recv(65536):
                        connection.sendall(data)
                    self.ended.set()
                except OSError:
                    pass


@pytest.fixture
def link():
    echo = Echo()
    with Proxy(echo.port) as proxy:
        proxy.echo = echo
        yield proxy
    echo.listener.close()


def connect(link: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), timeout=10)


def test_a_sound_link_passes_everything_both_ways(link) -> None:
    with connect(link) as sock:
        sock.sendall(b"x" * 100_000)
        got = b""
        while len(got) < 100_000:
            got += sock.recv(65536)
    assert (link.up_bytes, link.down_bytes) == (100_000, 100_000)


def test_rate_and_latency_slow_it_down(link) -> None:
    link.latency_seconds = 0.1
    began = time.monotonic()
    with connect(link) as sock:
        sock.sendall(b"ping")
        assert sock.recv(10) == b"ping"
    assert time.monotonic() - began >= 0.2
    link.latency_seconds, link.rate_bytes = 0.0, 10_000.0
    began = time.monotonic()
    with connect(link) as sock:
        sock.sendall(b"x" * 2_000)
        got = 0
        while got < 2_000:
            got += len(sock.recv(4096))
    assert time.monotonic() - began >= 0.4


def test_a_black_hole_keeps_the_connection_and_passes_nothing_until_it_ends(link) -> None:
    with connect(link) as sock:
        link.black_hole = True
        sock.sendall(b"ping")
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.recv(10)
        link.black_hole = False
        sock.settimeout(10)
        assert sock.recv(10) == b"ping"


def drained(sock: socket.socket, data: bytes = b"") -> str:
    """Send, read to the end and return how the connection ended."""
    try:
        sock.sendall(data)
        while sock.recv(10_000):
            pass
    except ConnectionError as error:
        return type(error).__name__
    return "end"


def test_resets_are_seen_as_resets(link) -> None:
    with connect(link) as sock:
        sock.sendall(b"ping")
        assert sock.recv(10) == b"ping"
        link.reset_all()
        assert drained(sock) == "ConnectionResetError"
    link.reset_after_bytes = 1_000
    with connect(link) as sock:
        assert drained(sock, b"x" * 5_000) != "end"
    assert link.num_resets == 2
    link.refuse = True
    with connect(link) as sock:
        assert drained(sock, b"x") in ("ConnectionResetError", "BrokenPipeError", "end")
    assert link.echo.listener.fileno() >= 0
    link.refuse = False
    with connect(link) as sock:
        sock.sendall(b"ping")
        assert sock.recv(10) == b"ping"


def test_half_close_ends_one_direction_only(link) -> None:
    with connect(link) as sock:
        sock.sendall(b"ping")
        assert sock.recv(10) == b"ping"
        link.half_close = True
        sock.sendall(b"lost")
        assert link.echo.ended.wait(10)
