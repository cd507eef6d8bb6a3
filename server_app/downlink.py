"""The lossy way down: what the sites hold, what each is sent, and what a checkpoint keeps of it.

    theta    the server's state: merges and outer steps happen here
    shadow   bit for bit what every site holds that has the newest version; theta - shadow is the server's residual

A version is made at each commit (`compression.downlink`) and is part of the same checkpoint. A site in step is sent
one frame, one that is behind the frames it lacks or a lossless snapshot, whichever is fewer bytes; a site that
already has the newest version is sent nothing. What a site has is what it last proved or said: a wrong belief ends as
a refusal that names what is there (`gap`), and the next message is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from compression import Layout
from compression.downlink import Downlink, pack
from compression.payload import is_exact
from strategies import UmbelStrategy
from strategies.aggregation.dtypes import kind_of
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.seeds import derive_seed

# Methods whose sites all get the whole state and send the whole state back.
PLAIN = ("fedavg", "fedit", "sparseloco")
PREFIX = "downlink/"
# Travels where a site has everything already: an empty array is no frame.
NOTHING = b"\x00"

Arrays = Mapping[str, np.ndarray]


class Parcel(NamedTuple):
    """What one site is sent: the bytes, and the directive that says what they are."""

    data: bytes
    directive: dict[str, Any]


class Broadcast:
    """The downlink of one run; `keep_versions` frames are kept for sites that fall behind."""

    def __init__(self, config: Config, layout: Layout, state: Arrays, *, keep_versions: int = 8) -> None:
        self._seed = config.run.seed
        self._link = Downlink(state, layout, config.compression.down, keep_versions=keep_versions)
        self._made: dict[str, Parcel] = {}

    @property
    def shadow(self) -> dict[str, np.ndarray]:
        """What the sites hold."""
        return self._link.shadow

    @property
    def digest(self) -> str:
        """Name of the shadow's bits in the chain."""
        return self._link.digest

    def publish(self, state: Arrays, round_index: int) -> dict[str, Any]:
        """Make the version that follows a commit; returns what the round's record says about it."""
        version = self._link.publish(
            state, seed=derive_seed(self._seed, "down", round_index), round_index=round_index
        )
        self._made = {}
        return {
            "version": version.number,
            "bytes": len(version.frame),
            "chain": version.chain,
            "digest": version.digest,
            "residual_norm": distance(state, self.shadow),
        }

    def parcel(self, held: str) -> Parcel:
        """Return what a site is sent that holds the model named `held`; equal for all that hold the same."""
        if held not in self._made:
            update = self._link.catch_up(held)
            data, document = pack(update)
            self._made[held] = Parcel(data or NOTHING, {"downlink": document})
            self._link.forget_snapshot()
        return self._made[held]

    def onto(self, arrays: Arrays, state: Arrays) -> dict[str, np.ndarray]:
        """Return what a site's values stand for at the server: its change, taken against the shadow, on `state`."""
        moved = {}
        for name, value in arrays.items():
            if kind_of(value.dtype) != "floating":
                moved[name] = value
                continue
            change = value.astype(np.float32) - self.shadow[name].astype(np.float32)
            moved[name] = state[name].astype(np.float32) + change
        return moved

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return (arrays, document) for the checkpoint."""
        arrays, document = self._link.state()
        return {PREFIX + name: array for name, array in arrays.items()}, dict(document)

    def restore(self, arrays: Arrays, document: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        mine = {n.removeprefix(PREFIX): a for n, a in arrays.items() if n.startswith(PREFIX)}
        self._link.restore(mine, document)
        self._made = {}


def broadcast_of(config: Config, strategy: UmbelStrategy, state: Arrays) -> Broadcast | None:
    """Return the downlink of a run whose way down is lossy, None where it is exact."""
    down = config.compression.down
    if is_exact(down):
        return None
    return Broadcast(config, strategy.layout, state, keep_versions=config.compression.down_log)


def distance(left: Arrays, right: Arrays) -> float:
    """Return the L2 norm of the difference over floating tensors."""
    squared = 0.0
    for name, value in left.items():
        if kind_of(value.dtype) == "floating":
            gap = (value.astype(np.float32) - right[name].astype(np.float32)).reshape(-1)
            squared += float(np.dot(gap, gap))
    return squared**0.5


def held_in(reason: str) -> str:
    """Return the name of the model that a refusal for a gap says is there; empty for none."""
    name = reason.rsplit(" ", 1)[-1]
    return name if len(name) == 64 else ""


def check_downlink(config: Config) -> None:
    """Raise ConfigError where a lossy `compression.down` cannot be right."""
    down = config.compression.down
    if is_exact(down):
        return
    if config.run.method not in PLAIN:
        raise ConfigError(
            "compression.down",
            f"cannot lose bits with run.method = {config.run.method!r}: its sites do not all hold the whole state, so "
            "there is no common model to send changes of",
            got=down,
            allowed=f"'exact' or 'lossless', or run.method in {', '.join(PLAIN)}",
        )
    for key, wrong, why in (
        (
            "clients.late",
            config.clients.late != "drop",
            "a late update was made against a model that is gone",
        ),
        (
            "run.checkpoint-every",
            config.run.checkpoint_every != 1,
            "a version must be as durable as its round",
        ),
        (
            "telemetry.keep-updates",
            config.telemetry.keep_updates,
            "kept updates are read against exact states",
        ),
    ):
        if wrong:
            raise ConfigError(
                key,
                f"cannot be combined with a lossy compression.down: {why}",
                got=down,
                allowed="clients.late = 'drop', run.checkpoint-every = 1, telemetry.keep-updates = false",
            )


def split_memory(arrays: Arrays) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (the method's arrays, the downlink's) of a checkpoint's strategy file."""
    own = {n: a for n, a in arrays.items() if not n.startswith(PREFIX)}
    return own, {n: a for n, a in arrays.items() if n.startswith(PREFIX)}
