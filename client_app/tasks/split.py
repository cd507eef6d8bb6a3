"""The site's round of split learning: chunks of K batches over a transport, one step of the site's half a chunk.

    per chunk   K batches from the cursor ── half.chunk(...) ──► frames over the transport, answers, one optimiser step
    at the end  DONE(last complete chunk) ── the server's half stops at the same one

A chunk is gradient accumulation: `split.chunk` batches are one step, as `train.accumulation` batches are without a cut.
Between chunks the deadline is looked at; what was begun and not finished counts for nothing on either side. The half
itself (`client_app.split`) knows the model, the cut and the source of its gradient; the transport knows neither.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import compression
from client_app.clock import Clock
from umbel.config.schema import Config
from umbel.data.cursor import Cursor, take
from umbel.errors import Refusal, RefusalKind
from umbel.local_step import rate_at
from umbel.split import SAVE_HEAD, Frame, FrameKind, SplitTransport

# Chunks without a supervised token that are passed over in one call.
MAX_EMPTY = 8


@dataclass
class SplitResult:
    """What a round left at the site: tensors of its half under whole-model names, and what they cost."""

    arrays: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    cursor: Cursor
    tokens: int
    chunks: int
    loss: float
    partial: bool
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Progress:
    """Where a round stands between two chunks."""

    cursor: Cursor
    chunk: int = 0
    tokens: int = 0
    loss_sum: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "cursor": [self.cursor.epoch, self.cursor.position],
            "chunk": self.chunk,
            "tokens": self.tokens,
            "loss_sum": self.loss_sum,
        }

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Progress:
        """Inverse of `plain`."""
        return cls(Cursor(*values["cursor"]), values["chunk"], values["tokens"], values["loss_sum"])


def batches_of(
    rows: list[Any], config: Config, cursor: Cursor, *, site: str, chunk: int
) -> tuple[list[list[Any]], Cursor]:
    """Return the K batches of rows of the next chunk and the cursor after them."""
    size = config.train.batch_size
    picked, after = take(cursor, len(rows), size * chunk, seed=config.run.seed, site=site)
    chosen = [rows[i] for i in picked]
    return [chosen[i : i + size] for i in range(0, len(chosen), size)], after


def train_chunks(
    half: Any,
    rows: list[Any],
    config: Config,
    clock: Clock,
    transport: SplitTransport,
    progress: Progress,
    *,
    site: str,
    first_step: int,
    total_steps: int,
    num_chunks: int,
    only: int = 0,
) -> Progress:
    """Do chunks until `num_chunks` are done (at most `only` of them now, 0: no limit) or the deadline passes.

    Raises Refusal NON_FINITE when a loss is not finite; SplitError from the transport passes through.
    """
    done = empty = 0
    while progress.chunk < num_chunks and not clock.expired and not (only and done >= only):
        groups, cursor = batches_of(rows, config, progress.cursor, site=site, chunk=config.split.chunk)
        rate = rate_at(config.train, first_step + progress.chunk, total_steps)
        result = half.chunk(progress.chunk + 1, groups, transport, rate)
        if result.tokens == 0:
            # Nothing to learn from in these rows, and nothing was sent: the next ones take their place.
            empty += 1
            if empty > MAX_EMPTY:
                raise Refusal(RefusalKind.NO_DATA, f"{empty} chunks in a row without a supervised token")
            progress = replace(progress, cursor=cursor)
            continue
        if not np.isfinite(result.loss_sum):
            raise Refusal(
                RefusalKind.NON_FINITE, f"the loss became {result.loss_sum} in chunk {progress.chunk + 1}"
            )
        progress = Progress(
            cursor,
            progress.chunk + 1,
            progress.tokens + result.tokens,
            progress.loss_sum + float(result.loss_sum),
        )
        done += 1
        save_half(half, transport, progress, config.split.save_every, num_chunks)
        clock.note(progress.chunk, progress.tokens)
    return progress


def save_half(half: Any, transport: SplitTransport, progress: Progress, every: int, num_chunks: int) -> None:
    """Leave the half at the server every so many chunks, so that a later death costs only what came after."""
    if every and progress.chunk % every == 0 and progress.chunk < num_chunks:
        head = SAVE_HEAD.pack(progress.tokens, progress.loss_sum)
        frame = compression.encode(half.arrays(), half.layout, "exact")
        transport.exchange(Frame(FrameKind.SAVE, progress.chunk, 0, head + bytes(frame)))


def finish(half: Any, transport: SplitTransport, progress: Progress, num_chunks: int) -> SplitResult:
    """Tell the server where this site stopped and return the round's result; raises Refusal when nothing was done."""
    if progress.chunk == 0:
        raise Refusal(RefusalKind.DEADLINE, "no chunk could be finished before the deadline")
    note = json.dumps({"chunks": progress.chunk, "tokens": progress.tokens}).encode()
    transport.exchange(Frame(FrameKind.DONE, progress.chunk, 0, note))
    return SplitResult(
        half.arrays(),
        half.moments(),
        progress.cursor,
        progress.tokens,
        progress.chunk,
        progress.loss_sum / max(1, progress.tokens),
        progress.chunk < num_chunks,
    )


class Measured:
    """A transport that measures the round trips of another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._sent: list[float] = []
        self.trips: list[float] = []
        self.wait_seconds = 0.0

    def send(self, frame: Frame) -> None:
        """Send one frame."""
        self._sent.append(time.monotonic())
        self.inner.send(frame)

    def receive(self) -> Frame:
        """Return the next answer."""
        began = time.monotonic()
        frame = self.inner.receive()
        now = time.monotonic()
        self.wait_seconds += now - began
        if self._sent:
            self.trips.append(now - self._sent.pop(0))
        return frame

    def exchange(self, frame: Frame) -> Frame:
        """Send one frame and return its answer."""
        self.send(frame)
        return self.receive()

    def facts(self) -> dict[str, Any]:
        """Return waiting and round trips, seconds."""
        if not self.trips:
            return {"wait_seconds": self.wait_seconds}
        trips = sorted(self.trips)
        return {
            "wait_seconds": self.wait_seconds,
            "round_trip_seconds": [trips[0], trips[len(trips) // 2], trips[-1]],
        }
