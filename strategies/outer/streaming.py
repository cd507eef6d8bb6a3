"""Streaming fragments with overlap (Douillard et al. 2025, arXiv 2501.18512).

    fragment p of P       every P-th layer (strided), what is no layer goes to the smallest by bytes
    sent                  every H inner steps, fragment p at offset p H / P
    at the site           theta_p <- alpha theta_p + (1 - alpha) theta_p(global),   tau steps after it was sent
    at the server         Nesterov on each fragment alone

Every fragment has its own base (the global values its next delta is taken against), momentum and residual; all of it
is in `state_dict`, by fragment. H must be divisible by P, and tau shorter than the H / P steps between two fragments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.aggregation.outer import SGD
from umbel.errors import ConfigError

_LAYER = re.compile(r"(?:^|\.)(?:h|layers|blocks)\.(\d+)\.")


def fragments(num_bytes: Mapping[str, int], count: int) -> list[list[str]]:
    """Return the tensor names of each of `count` fragments, sorted by name.

    Layers go round robin (layer l to fragment l mod count); all other tensors, largest first, to the fragment with
    the fewest bytes so far. Raises ConfigError for more fragments than tensors.
    """
    if not 1 <= count <= len(num_bytes):
        raise ConfigError(
            "server.fragments", "cannot be had of this model", got=count, allowed=f"1 .. {len(num_bytes)}"
        )
    found: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    rest = []
    for name in sorted(num_bytes):
        layer = _LAYER.search(name)
        if layer is None:
            rest.append(name)
            continue
        at = int(layer.group(1)) % count
        found[at].append(name)
        sizes[at] += num_bytes[name]
    for name in sorted(rest, key=lambda n: (-num_bytes[n], n)):
        at = min(range(count), key=lambda i: (sizes[i], i))
        found[at].append(name)
        sizes[at] += num_bytes[name]
    return [sorted(names) for names in found]


@dataclass(frozen=True)
class Schedule:
    """When each fragment is sent and mixed in, in inner steps from 0."""

    period: int
    count: int
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.count < 1 or self.period % self.count:
            raise ConfigError(
                "train.local-steps",
                f"is not divisible by the number of fragments {self.count}",
                got=self.period,
                allowed=f"a multiple of {self.count}",
            )
        if not 0 <= self.overlap < self.period // self.count:
            raise ConfigError(
                "server.overlap",
                "is not shorter than the steps between two fragments",
                got=self.overlap,
                allowed=f"0 .. {self.period // self.count - 1}",
            )

    @property
    def stride(self) -> int:
        """Inner steps between two fragments."""
        return self.period // self.count

    def sent_after(self, step: int) -> int | None:
        """Return the fragment that is sent when `step` steps are done; None for none."""
        if step == 0 or step % self.stride:
            return None
        return (step // self.stride - 1) % self.count

    def mixed_after(self, step: int) -> int | None:
        """Return the fragment whose merge is mixed in when `step` steps are done."""
        return self.sent_after(step - self.overlap) if step > self.overlap else None


def mix(local: np.ndarray, merged: np.ndarray, alpha: float) -> np.ndarray:
    """Return alpha local + (1 - alpha) merged, float64 inside, in the local dtype."""
    wide = alpha * local.astype(np.float64) + (1.0 - alpha) * merged.astype(np.float64)
    return wide.astype(local.dtype)


class Fragmented:
    """Server side: global values, one outer optimiser and one version count a fragment."""

    def __init__(
        self, state: Mapping[str, np.ndarray], parts: Sequence[Sequence[str]], lr: float, momentum: float
    ) -> None:
        self.state = {name: np.array(value, order="C") for name, value in state.items()}
        self.parts = [list(names) for names in parts]
        self.outer = [SGD(lr, momentum, momentum > 0) for _ in parts]
        self.versions = [0] * len(parts)

    def merge(self, fragment: int, average: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Move one fragment towards `average` (values); returns its new global values."""
        names = self.parts[fragment]
        if set(average) != set(names):
            raise ConfigError(
                f"fragment {fragment}", "got other tensors", got=sorted(average)[:3], allowed=str(names[:3])
            )
        # Fresh arrays: what was handed out before is some site's base still.
        moved = {name: np.array(self.state[name], order="C") for name in names}
        self.outer[fragment].step(moved, average)
        self.state.update(moved)
        self.versions[fragment] += 1
        return moved

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return values, moments and versions of all fragments."""
        found = {f"value/{name}": value.copy() for name, value in self.state.items()}
        for index, outer in enumerate(self.outer):
            found |= {f"outer/{index}/{key}": value for key, value in outer.state_dict().items()}
        return {**found, "versions": np.array(self.versions)}

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over what `state_dict` returned."""
        self.versions = [int(v) for v in arrays["versions"]]
        self.state = {
            k.removeprefix("value/"): np.array(v) for k, v in arrays.items() if k.startswith("value/")
        }
        for index, outer in enumerate(self.outer):
            mine = f"outer/{index}/"
            outer.load_state_dict({k.removeprefix(mine): v for k, v in arrays.items() if k.startswith(mine)})
