"""A TCP link that can go wrong: rate, latency, reset, black hole, half-close. One thread with an asyncio loop.

    with Proxy(target_port) as link:
        link.rate_bytes = 25_000         # each direction of each connection, bytes a second; 0: no limit
        link.latency_seconds = 0.25      # before each piece is passed on
        link.black_hole = True           # take bytes and pass nothing on, connections stay up
        link.half_close = True           # tell the server side that the site has nothing more to say
        link.reset_all()                 # RST on all connections now
        link.reset_after_bytes = 40_000  # RST once the next connections have carried so much upwards
        link.refuse = True               # no new connections

Settings are read by the loop at every piece of 16 KiB, so that they take effect at once. `up_bytes` and
`down_bytes` count what was passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading

PIECE = 16 * 1024


class Proxy:
    """Listens on a free port of loopback and forwards to `target_port`."""

    def __init__(self, target_port: int) -> None:
        self.target_port, self.port = target_port, 0
        self.rate_bytes = 0.0
        self.latency_seconds = 0.0
        self.black_hole = self.half_close = self.refuse = False
        self.reset_after_bytes = 0
        self.up_bytes = self.down_bytes = self.num_resets = 0
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def reset_all(self) -> None:
        """Reset every connection, on both sides."""
        self._loop.call_soon_threadsafe(self._reset_pairs)

    def _reset_pairs(self) -> None:
        for pair in list(self._pairs):
            self._reset(pair)

    def _reset(self, pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.num_resets += 1
        self._pairs.discard(pair)
        for writer in pair:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                # Linger of zero seconds: close sends RST instead of FIN.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        server.close()
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, pair, up=True), self._pump(far_reader, writer, pair, up=False)
            )
        finally:
            self._pairs.discard(pair)
            for side in pair:
                side.close()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        *,
        up: bool,
    ) -> None:
        carried = 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await source.read(PIECE):
                if self.latency_seconds:
                    await asyncio.sleep(self.latency_seconds)
                if self.rate_bytes:
                    await asyncio.sleep(len(data) / self.rate_bytes)
                while self.black_hole:
                    await asyncio.sleep(0.05)
                if up and self.half_close:
                    break
                carried += len(data)
                if up and self.reset_after_bytes and carried >= self.reset_after_bytes:
                    self.reset_after_bytes = 0
                    self._reset(pair)
                    return
                # Counted first: whoever has received a byte finds it counted.
                if up:
                    self.up_bytes += len(data)
                else:
                    self.down_bytes += len(data)
                sink.write(data)
                await sink.drain()
            if sink.can_write_eof():
                sink.write_eof()
