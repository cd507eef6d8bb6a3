"""The endpoint of split learning's streams: one bidirectional gRPC stream a site and round, of opaque frames.

    site dials  ──►  metadata: token            checked, in constant time, before any payload is read
                ──►  HELLO                      ◄── READY
                ──►  frame (kind, chunk, step)  ◄── its answer, in the order of arrival
                ──►  DONE                       ◄── DONE, and the stream ends

A session is one site's share of one round. Its answers of the open chunk are kept: after a cut the site dials again
and repeats what it has no answer to; what was worked out before is answered from there and never worked out twice.
A frame of the next chunk acknowledges the one before. What breaks the rules (a malformed or oversize frame, a step out of
range, more unanswered frames than allowed) gets ABORT with the reason and ends that session alone.

gRPC carries bytes through generic handlers: no generated code, nothing is unpickled. Without a certificate the
endpoint opens on loopback only. It knows neither models nor Flower; `work(frame)` of a session does the computing.
"""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc

from umbel.errors import ConfigError
from umbel.split import Frame, FrameKind, SplitError, pack_frame, unpack_frame
from umbel.split_link import METHOD, SERVICE, TOKEN_BYTES, TOKEN_KEY, channel_options, is_loopback

log = logging.getLogger("umbel.server")

HELLO_SECONDS = 30.0
# How often a waiting stream looks whether its session was closed or taken over.
TICK_SECONDS = 0.5


class Standing(StrEnum):
    """Where a session is."""

    AWAITED = "awaited"
    CONNECTED = "connected"
    BROKEN = "broken"
    DONE = "done"
    FAILED = "failed"


@dataclass
class Traffic:
    """Bytes of whole frames, header included, each way; calls are answered frames."""

    up_bytes: int = 0
    down_bytes: int = 0
    calls: int = 0
    connections: int = 0
    replayed: int = 0


@dataclass(eq=False)
class Session:
    """One site's stream of one round. `work` computes the answer to one frame and is called once a frame, in order.

    `num_steps` is K, the frames of one kind in a chunk; `max_frame_bytes` bounds a payload. Times are `time.monotonic`.
    """

    site: str
    work: Callable[[Frame], Frame]
    num_steps: int
    max_frame_bytes: int
    ttl_seconds: float
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES), repr=False)
    standing: Standing = Standing.AWAITED
    reason: str = ""
    traffic: Traffic = field(default_factory=Traffic)
    opened_at: float = field(default_factory=time.monotonic)
    broken_at: float = 0.0
    chunk: int = 0
    _answers: dict[tuple[int, int, int], bytes] = field(default_factory=dict, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)
    _holder: object = field(default=None, repr=False)

    def expired(self, now: float) -> bool:
        """Tell whether the token is too old to be used."""
        return now - self.opened_at > self.ttl_seconds

    def broken_seconds(self, now: float) -> float:
        """Return for how long a stream that was there is gone; 0.0 while it is up, done or never came."""
        return now - self.broken_at if self.standing is Standing.BROKEN else 0.0

    def answer(self, frame: Frame) -> bytes:
        """Return the packed answer to one frame; raises SplitError when the frame breaks the rules."""
        key = (frame.kind, frame.chunk, frame.step)
        with self._lock:
            if key in self._answers:
                self.traffic.replayed += 1
                return self._answers[key]
            self._check(frame)
            if frame.chunk > self.chunk:
                # A frame of the next chunk says that every answer of this one has arrived.
                self._answers.clear()
                self.chunk = frame.chunk
            packed = pack_frame(self.work(frame))
            self._answers[key] = packed
            self.traffic.calls += 1
            return packed

    def _check(self, frame: Frame) -> None:
        if frame.kind in (FrameKind.HELLO, FrameKind.READY, FrameKind.OUT, FrameKind.BWD, FrameKind.ABORT):
            raise SplitError(f"a frame of kind {frame.kind.name} is not the site's to send here")
        if frame.kind is FrameKind.DONE:
            return
        if frame.kind is FrameKind.SAVE and frame.chunk != self.chunk:
            raise SplitError(f"what is saved is of chunk {frame.chunk}, open is {self.chunk}")
        if not self.chunk <= frame.chunk <= self.chunk + 1:
            raise SplitError(f"chunk {frame.chunk} is not the open chunk {self.chunk} or the next")
        if frame.step >= self.num_steps:
            raise SplitError(f"step {frame.step} is outside a chunk of {self.num_steps}")

    def fail(self, reason: str) -> None:
        """End the session: its halves count for nothing."""
        if self.standing is not Standing.DONE:
            self.standing, self.reason = Standing.FAILED, self.reason or reason


class Endpoint:
    """Listens for the streams of open sessions; `address` is host:port as bound.

    Raises ConfigError for a bind address off loopback without a certificate, or one that cannot be bound.
    """

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        certificate: tuple[bytes, bytes] | None = None,
        keepalive_seconds: float = 10.0,
        max_sessions: int = 64,
        max_frame_bytes: int = 64 * 2**20,
    ) -> None:
        host = bind.rpartition(":")[0]
        if certificate is None and not is_loopback(host):
            raise ConfigError(
                "split.bind",
                "would send activations in the clear: there is no split.tls-cert",
                got=bind,
                allowed="127.0.0.1:PORT, or any address with split.tls-cert and split.tls-key",
                remedy="Set split.tls-cert and split.tls-key, or put a TLS proxy on this host in front.",
            )
        self.max_sessions = max_sessions
        self._sessions: list[Session] = []
        self._guard = threading.Lock()
        self._pool = ThreadPoolExecutor(max_sessions + 4, thread_name_prefix="umbel-split")
        self._server = grpc.server(
            self._pool,
            options=channel_options(keepalive_seconds, max_frame_bytes, server=True),
            maximum_concurrent_rpcs=max_sessions + 4,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        try:
            if certificate is None:
                port = self._server.add_insecure_port(bind)
            else:
                key, chain = certificate
                port = self._server.add_secure_port(bind, grpc.ssl_server_credentials([(key, chain)]))
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                "split.bind", f"cannot be opened ({error})", got=bind, allowed="a free host:port"
            ) from None
        self.address = f"{host}:{port}"
        self.port = int(port)
        self._server.start()

    def open(self, session: Session) -> Session:
        """Let one session in; raises SplitError when `max_sessions` are open."""
        with self._guard:
            if len(self._sessions) >= self.max_sessions:
                raise SplitError(f"{self.max_sessions} sessions are open already (split.max-sessions)")
            self._sessions.append(session)
        return session

    def close(self, session: Session, reason: str = "the round is over") -> None:
        """Void a session's token and end its stream."""
        with self._guard:
            if session in self._sessions:
                self._sessions.remove(session)
        session.fail(reason)

    def stop(self) -> None:
        """End everything and free the port."""
        for session in list(self._sessions):
            self.close(session, "the server stops")
        self._server.stop(grace=1.0).wait(5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _session_of(self, context: grpc.ServicerContext) -> Session | None:
        """Return the session whose token came with the call; every open token is compared, in constant time each."""
        given = b""
        for key, value in context.invocation_metadata():
            if key == TOKEN_KEY and isinstance(value, bytes):
                given = value
        found, now = None, time.monotonic()
        with self._guard:
            for session in self._sessions:
                if hmac.compare_digest(session.token, given) and not session.expired(now):
                    found = session
        return found if found is not None and found.standing is not Standing.FAILED else None

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        session = self._session_of(context)
        if session is None:
            # Nothing of the stream has been read yet, and nothing is said about why.
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown or expired token")
        assert session is not None
        stream = _Stream(session, requests, context)
        try:
            yield from stream.run()
        finally:
            stream.end()


class _Stream:
    """One connection of a session; a later one with the same token takes over."""

    def __init__(self, session: Session, requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        self.session, self._requests, self._context = session, requests, context
        # The reader may be K frames ahead of the work; then the stream's own flow control holds the site back.
        self._inbox: queue.Queue[bytes | None] = queue.Queue(maxsize=session.num_steps + 1)
        self._over = threading.Event()
        session._holder = self
        session.standing = session.standing if session.standing is Standing.DONE else Standing.CONNECTED
        session.traffic.connections += 1
        context.add_callback(self._hang_up)
        threading.Thread(target=self._read, daemon=True, name="umbel-split-read").start()

    def _read(self) -> None:
        try:
            for data in self._requests:
                self._put(data)
        except Exception as error:
            # grpc raises a bare Exception when the stream breaks; a frame above the cap is reset by gRPC itself.
            log.debug("split stream of site %s broke: %s", self.session.site, error)
        self._put(None)

    def _put(self, item: bytes | None) -> None:
        while not self._over.is_set():
            try:
                return self._inbox.put(item, timeout=TICK_SECONDS)
            except queue.Full:
                continue

    def _hang_up(self) -> None:
        self._over.set()
        self.end()

    def end(self) -> None:
        """Note that the connection is gone, unless another one took over."""
        self._over.set()
        session = self.session
        if session._holder is self and session.standing is Standing.CONNECTED:
            session.standing, session.broken_at = Standing.BROKEN, time.monotonic()

    def _next(self, seconds: float) -> bytes | None:
        """Return the next frame's bytes; None when the stream ended, was taken over or its session closed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.session._holder is not self or self.session.standing is Standing.FAILED:
                return None
            try:
                return self._inbox.get(timeout=TICK_SECONDS)
            except queue.Empty:
                if self._over.is_set():
                    return None
        return None

    def run(self) -> Iterator[bytes]:
        """Yield the answers; an ABORT is the last one when the session fails."""
        session = self.session
        try:
            yield from self._greet()
            while (data := self._next(session.ttl_seconds)) is not None:
                session.traffic.up_bytes += len(data)
                frame = unpack_frame(data, max_bytes=session.max_frame_bytes)
                packed = session.answer(frame)
                if frame.kind is FrameKind.DONE:
                    session.standing = Standing.DONE
                session.traffic.down_bytes += len(packed)
                yield packed
                if frame.kind is FrameKind.DONE:
                    return
        except SplitError as error:
            session.fail(str(error))
        except Exception as error:
            log.warning("split session of site %s failed", session.site, exc_info=True)
            session.fail(f"the server's half failed: {type(error).__name__}")
        if session.standing is Standing.FAILED and session._holder is self:
            log.warning("split session of site %s: %s", session.site, session.reason)
            yield pack_frame(Frame(FrameKind.ABORT, 0, 0, session.reason.encode()[:400]))

    def _greet(self) -> Iterator[bytes]:
        data = self._next(HELLO_SECONDS)
        if data is None:
            return
        frame = unpack_frame(data, max_bytes=self.session.max_frame_bytes)
        if frame.kind is not FrameKind.HELLO:
            raise SplitError(f"the first frame is {frame.kind.name}, not HELLO")
        with self.session._lock:
            ready = self.session.work(frame)
        packed = pack_frame(ready)
        self.session.traffic.up_bytes += len(data)
        self.session.traffic.down_bytes += len(packed)
        yield packed
