"""What every part of the round engine works with, and what the engine knows so far.

`Context` is the fixed part: configuration, method, mailbox, sites, clock. `Standing` is what rounds change; a
checkpoint holds it (all but `doubtful`, which only saves bytes).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from server_app.downlink import Broadcast
from server_app.joining import Joining
from server_app.leases import LeaseTable
from server_app.mailbox import Mailbox
from server_app.operator import Operator
from server_app.sites import Registry
from strategies import UmbelStrategy
from umbel.config import Config


@dataclass
class Standing:
    """The global state and what the engine has learned; `state` is replaced whole at each commit.

    `attempts` is the last attempt of a round that was opened, by an earlier life of this server too: never used
    again. `norms` and `arrivals` (seconds) are the newest of accepted updates. `doubtful` are the sites that failed or
    refused since their last accepted update: they are sent everything.
    """

    state: dict[str, np.ndarray]
    round: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Context:
    """What dispatch, collecting and commit share. `fault(point, round)` is where tests kill the process."""

    config: Config
    strategy: UmbelStrategy
    mailbox: Mailbox
    joining: Joining
    run: str
    event: Callable[..., None]
    operator: Operator
    standing: Standing
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    poll_seconds: float = 0.25
    fault: Callable[[str, int], Any] = lambda point, round_index: None
    # `server_app.split_round.SplitRounds` of a split run.
    split: Any = None
    # The lossy way down; None where a site is sent the state itself.
    broadcast: Broadcast | None = None
    # The book of a common corpus (`data.leases = 'server'`).
    leases: LeaseTable | None = None

    @property
    def registry(self) -> Registry:
        """The sites of this run."""
        return self.joining.registry
