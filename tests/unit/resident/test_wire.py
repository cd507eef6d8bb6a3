"""The socket between a message's process and the worker: what is refused, and that nothing waits for ever."""

from __future__ import annotations

import os
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_app.resident import wire

JSON = st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=20), st.booleans()))


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


@given(JSON, st.one_of(st.none(), st.binary(max_size=5000)))
def test_an_item_arrives_as_it_was_sent(values, frame) -> None:
    left, right = pair()
    with left, right:
        wire.send(left, {**values, "type": "x"}, frame)
        assert wire.receive(right, seconds=5) == ({**values, "type": "x"}, frame)


def test_a_frame_larger_than_the_socket_buffer_arrives_whole() -> None:
    left, right = pair()
    frame = os.urandom(5_000_001)
    with left, right:
        sender = threading.Thread(target=wire.send, args=(left, {"type": "x"}, frame))
        sender.start()
        assert wire.receive(right, seconds=30)[1] == frame
        sender.join()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "starts with"),
        (struct.pack("<4sIQ", b"UMB1", 2**31, 0), "header of 2147483648 bytes"),
        (struct.pack("<4sIQ", b"UMB1", 2, 2**62), "frame of"),
        (struct.pack("<4sIQ", b"UMB1", 3, 0) + b"{{{", "not JSON"),
        (struct.pack("<4sIQ", b"UMB1", 2, 0) + b"[]", "not an object"),
        (struct.pack("<4sIQ", b"UMB1", 10, 0) + b'{"type":1}', "not an object"),
        (struct.pack("<4sIQ", b"UMB1", 100_000, 0) + b"[" * 100_000, "not JSON"),
    ],
)
def test_malformed_and_oversize_items_are_refused(raw, words) -> None:
    left, right = pair()
    with left, right:
        left.sendall(raw)
        with pytest.raises(wire.WireError, match=words):
            wire.receive(right, seconds=5)


def test_a_side_that_is_gone_and_one_that_is_silent_are_told_apart() -> None:
    left, right = pair()
    with left, right:
        left.sendall(b"UMB1")
        with pytest.raises(wire.WireTimeout):
            wire.receive(right, seconds=0.05)
        left.close()
        with pytest.raises(wire.WireClosed):
            wire.receive(right, seconds=5)


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    left, right = pair()
    with left, right:
        assert wire.peer(left) == (os.getpid(), os.getuid())
