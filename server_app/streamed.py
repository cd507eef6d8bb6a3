"""Whole models by the lean way: an update is checked and merged from its frame, and is dense nowhere.

    arrival    header, layout, checksum, every value finite, norm: one segment at a time
    commit     `strategies.outer.streamed`: sum, outer step and store, one segment at a time

For train.mode = "full" with a lossy compression.up, averaged by weight, where nothing needs a single update whole:
no robust merge, no privacy, no kept updates, no late ones, no round of one site. What it gives differs from the general
way by the roundings that it does not do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import xxhash

from compression import FrameError, Layout
from compression.api import check_policy
from compression.frame import read_header
from compression.payload import delta_layout, is_exact
from compression.summing import sums
from server_app.context import Context
from server_app.opened import OpenRound
from server_app.spool import Entry
from server_app.validate import Rejected
from strategies import Outcome
from strategies.outer import streamed
from strategies.outer.solo import is_degraded
from umbel.config import Config
from umbel.exchange import Exchange

METHODS = ("fedavg", "sparseloco")


def applies(config: Config, state: dict[str, np.ndarray], outer: object) -> bool:
    """Tell whether a run's updates go the lean way."""
    return (
        config.train.mode == "full"
        and config.run.method in METHODS
        and not is_exact(config.compression.up)
        and config.clients.merge == "mean"
        and config.clients.mode == "sync"
        and config.clients.late == "drop"
        and config.clients.normalise == "received"
        and config.privacy.clip_norm == 0
        and not config.telemetry.keep_updates
        and streamed.takes(state, outer)
    )


def inspect(frame: bytes, layout: Layout, up: str) -> tuple[float, str]:
    """Return (norm of the change, name of the frame's bits); raises Rejected for a frame that is not usable."""
    wide, squared = delta_layout(layout), 0.0
    try:
        used = read_header(frame).policy
        if used != check_policy(up).wire():
            raise FrameError("policy", f"the frame's codec {used[:80]} is not the one asked for ({up})")
        for piece in sums([frame], wide, [1.0]):
            if piece.total is not None:
                squared += float(np.dot(piece.total, piece.total))
    except FrameError as error:
        raise Rejected("frame", f"{error}") from error
    except (ValueError, TypeError, MemoryError, OverflowError) as error:
        raise Rejected("frame", f"{type(error).__name__}: {error}") from error
    return math.sqrt(squared), xxhash.xxh3_128(frame).hexdigest()


def can_merge(ctx: Context, opened: OpenRound, entries: Sequence[Entry]) -> bool:
    """Tell whether this round's updates are all of the lean kind."""
    plain = all(e.order.exchange == Exchange() and not e.late for e in entries)
    alone = is_degraded(ctx.config.server.solo, len(opened.asked), len(entries))
    return plain and not alone and applies(ctx.config, ctx.standing.state, ctx.strategy.outer)


def merge(ctx: Context, opened: OpenRound, entries: Sequence[Entry]) -> Outcome:
    """Return the next state; raises `streamed.Diverged` when it is not finite."""
    frames = [opened.spool.frame(e) for e in entries]
    layout = delta_layout(entries[0].order.up_layout)
    names = [e.reply.site for e in entries]
    outer = ctx.strategy.outer
    state, gauges = streamed.merge(
        ctx.standing.state,
        frames,
        layout,
        [e.weight for e in entries],
        outer,  # type: ignore[arg-type]
        names,
    )
    return Outcome(state, {"gauges": gauges} if gauges else {})
