"""The site's end of a split stream: dials out, sends frames ahead, resumes after a cut.

    with SplitStream(dial) as stream:
        ready = stream.greet(hello)              READY's payload
        stream.send(frame); stream.send(frame)   at most `window` without an answer; then it waits
        answer = stream.receive()                answers come in the order of the frames

What has no answer yet is kept. When the connection breaks it is dialled again, for `patience_seconds` at most: HELLO,
then the kept frames once more; the server answers those it knows from what it stored. Plaintext is dialled on
loopback only. Errors: `Unreachable` when no stream could be had at all (the caller may fall back to messages),
`SplitError` when the server ends the session (its reason) or stays away. No Flower and no torch here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from umbel.errors import Refusal, RefusalKind
from umbel.split import Frame, FrameKind, SplitError, pack_frame, unpack_frame
from umbel.split_link import PATH, TOKEN_KEY, channel_options, host_of, is_loopback

log = logging.getLogger("umbel.site")

RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
# What an answer may take on a server that shares its processor with other sites.
ANSWER_SECONDS = 600.0
# Connections in a row that were accepted and broke before a single answer: then something is wrong for good.
MAX_FRUITLESS = 4


class Unreachable(SplitError):
    """No stream could be opened; nothing of the round has been done."""


@dataclass(frozen=True)
class Dial:
    """Where and how to dial; `certificate` is the server's PEM chain or the roots to trust, empty for plaintext."""

    address: str
    token: bytes
    certificate: bytes = b""
    keepalive_seconds: float = 10.0
    max_frame_bytes: int = 64 * 2**20
    window: int = 8
    connect_seconds: float = 10.0
    patience_seconds: float = 30.0

    def check(self, allowed: tuple[str, ...] = ()) -> Dial:
        """Return self, or raise Refusal when this site must not dial the address."""
        if allowed and self.address not in allowed:
            raise Refusal(
                RefusalKind.POLICY,
                f"split-addresses of this site's node config does not list {self.address!r}",
            )
        if not self.certificate and not is_loopback(host_of(self.address)):
            raise Refusal(
                RefusalKind.REFUSED,
                f"{self.address} has no certificate and is not this machine: activations are not sent in the clear",
            )
        return self


@dataclass
class Traffic:
    """Bytes of whole frames each way, calls answered, connections made, seconds spent waiting for answers."""

    up_bytes: int = 0
    down_bytes: int = 0
    calls: int = 0
    connections: int = 0
    wait_seconds: float = 0.0


class SplitStream:
    """One round's stream. Not for use by several threads."""

    def __init__(self, dial: Dial, *, expired: Callable[[], bool] = lambda: False) -> None:
        self.dial, self.traffic = dial, Traffic()
        self._expired = expired
        self._unanswered: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        self._ready: list[Frame] = []
        self._hello: Frame | None = None
        self._link: _Link | None = None
        self.last_ready: Frame | None = None

    def __enter__(self) -> SplitStream:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def greet(self, hello: Frame) -> Frame:
        """Open the stream and return READY; raises Unreachable within `connect_seconds`, SplitError when refused."""
        self._hello = hello
        deadline = time.monotonic() + self.dial.connect_seconds
        return self._connect(deadline, first=True)

    def send(self, frame: Frame) -> None:
        """Send one frame; while `window` frames have no answer it first waits for one."""
        while len(self._unanswered) >= self.dial.window:
            self._ready.append(self._take())
        packed = pack_frame(frame)
        self._unanswered[(frame.kind, frame.chunk, frame.step)] = packed
        self.traffic.up_bytes += len(packed)
        if self._link is not None:
            self._link.send(packed)

    def receive(self) -> Frame:
        """Return the next answer; dials again when the connection breaks."""
        return self._ready.pop(0) if self._ready else self._take()

    def exchange(self, frame: Frame) -> Frame:
        """Send one frame and return its answer; nothing else may be in flight."""
        self.send(frame)
        return self.receive()

    def close(self) -> None:
        """Hang up."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _take(self) -> Frame:
        if not self._unanswered:
            raise SplitError("an answer was asked for and nothing was sent")
        began, fruitless = time.monotonic(), 0
        try:
            while True:
                try:
                    if self._link is None:
                        raise _Broken("not connected")
                    frame = self._link.receive(ANSWER_SECONDS)
                    break
                except _Broken as error:
                    fruitless += 1
                    if fruitless > MAX_FRUITLESS:
                        raise SplitError(
                            f"the stream broke {fruitless} times without an answer: {error}"
                        ) from None
                    log.warning("the split stream broke (%s); dialling again", error)
                    self._connect(time.monotonic() + self.dial.patience_seconds, first=False)
        finally:
            self.traffic.wait_seconds += time.monotonic() - began
        self.traffic.down_bytes += frame.packed_bytes
        self.traffic.calls += 1
        # Answers come in order; each is for the oldest frame without one.
        (_, chunk, step), _ = self._unanswered.popitem(last=False)
        if (frame.chunk, frame.step) != (chunk, step):
            raise SplitError(
                f"the answer is for step {frame.chunk}.{frame.step}, the oldest question is {chunk}.{step}"
            )
        return frame

    def _connect(self, deadline: float, *, first: bool) -> Frame:
        assert self._hello is not None
        self.close()
        for attempt in range(1_000_000):
            if self._expired():
                raise Refusal(RefusalKind.DEADLINE, "the split stream was away until the deadline")
            link = _Link(self.dial)
            try:
                packed = pack_frame(self._hello)
                link.send(packed)
                ready = link.receive(max(0.1, deadline - time.monotonic()))
                if ready.kind is not FrameKind.READY:
                    raise SplitError(f"the server greets with {ready.kind.name}, not READY")
                self.traffic.connections += 1
                self.traffic.up_bytes += len(packed)
                self.traffic.down_bytes += ready.packed_bytes
                self._link, self.last_ready = link, ready
                for kept in self._unanswered.values():
                    self.traffic.up_bytes += len(kept)
                    link.send(kept)
                return ready
            except _Broken as error:
                link.close()
                pause = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                if time.monotonic() + pause >= deadline:
                    what = f"{self.dial.address} gave no split stream: {error}"
                    raise (Unreachable(what) if first else SplitError(what)) from None
                time.sleep(pause)
            except BaseException:
                link.close()
                raise
        raise AssertionError


class _Broken(Exception):
    """The connection ended without a word from the server's session."""


class _Link:
    """One connection."""

    def __init__(self, dial: Dial) -> None:
        import grpc

        self._grpc, self._dial = grpc, dial
        local = is_loopback(host_of(dial.address))
        options = channel_options(dial.keepalive_seconds, dial.max_frame_bytes, local=local)
        if dial.certificate:
            credentials = grpc.ssl_channel_credentials(root_certificates=dial.certificate)
            self._channel = grpc.secure_channel(dial.address, credentials, options=options)
        else:
            self._channel = grpc.insecure_channel(dial.address, options=options)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        call = self._channel.stream_stream(PATH)
        self._call = call(self._requests(), metadata=((TOKEN_KEY, dial.token),))
        threading.Thread(target=self._listen, daemon=True, name="umbel-split-listen").start()

    def _requests(self) -> Iterator[bytes]:
        while (item := self._outbox.get()) is not None:
            yield item

    def _listen(self) -> None:
        try:
            for data in self._call:
                self._inbox.put(data)
            self._inbox.put(_Broken("the server ended the stream"))
        except Exception as error:
            self._inbox.put(error)

    def send(self, packed: bytes) -> None:
        self._outbox.put(packed)

    def receive(self, seconds: float) -> Frame:
        try:
            item: Any = self._inbox.get(timeout=seconds)
        except queue.Empty:
            raise _Broken(f"no answer in {seconds:.0f} s") from None
        if isinstance(item, bytes):
            frame = unpack_frame(item, max_bytes=self._dial.max_frame_bytes)
            if frame.kind is FrameKind.ABORT:
                raise SplitError(f"the server ended the session: {frame.text()}")
            return frame
        if isinstance(item, self._grpc.RpcError):
            code = item.code()
            if code is self._grpc.StatusCode.UNAUTHENTICATED:
                raise SplitError("the server does not know this session's token (any more)")
            raise _Broken(f"{code.name.lower()}: {' '.join((item.details() or '').split())[:160]}")
        raise _Broken(str(item))

    def close(self) -> None:
        self._outbox.put(None)
        self._call.cancel()
        self._channel.close()
