"""The noisy mean of clipped updates: what a release under `privacy.*` is.

    S   = sum_i delta_i min(1, C / ||delta_i||)          over the updates that came, in float64, in canonical order
                                                         delta_i against what site i was sent
    x  <-  g + (S + N(0, z^2 C^2 I)) / n                 n fixed before the round: the sites that were asked

(DP-FedAvg with a fixed denominator: McMahan et al. 2018, arXiv 1710.06963, Sec. 3.) One site changes S by at most C,
whatever the others send and however many do not answer; dividing by n is post-processing, so the guarantee holds with
m < n updates. Neighbours are runs in which one site's updates are replaced by zero; *that* a site took part is not
hidden. Norm and noise run over the tensors that travel, as they travel (for adapters over factors, where the noise of
A and B multiplies: `ffa` and `rolora` release one factor at a time). Integers and flags keep the server's value.

Sites clip before they encode; here the bound is enforced again, after decoding, because a site may not have and a
codec may lengthen. A server optimiser runs after the noise. The arithmetic of the noise: `umbel.privacy.noise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from strategies.base import Outcome, SiteUpdate, UmbelStrategy
from umbel.privacy.clip import change_norm, clip_factor, is_floating
from umbel.privacy.noise import Normal

# What rounding to the exchanged dtype may add to a norm that a site has clipped to the bound.
ROUNDING = 1e-3

Arrays = Mapping[str, np.ndarray]


class PrivateMean:
    """Merges updates under privacy; one object a run, without memory between rounds."""

    def __init__(self, strategy: UmbelStrategy) -> None:
        self.strategy, self.settings = strategy, strategy.config.privacy

    def aggregate(
        self,
        state: Arrays,
        updates: Iterable[SiteUpdate],
        *,
        num_asked: float,
        before_release: Callable[[], Normal],
    ) -> Outcome:
        """Return the next state.

        `num_asked` is n. `before_release` is called when the sum is made and before noise is drawn: it writes the
        ledger, may raise to forbid the release, and returns the source of the noise.
        """
        total, num_clipped = self._sum(state, updates)
        normal = before_release()
        deviation = self.settings.noise_multiplier * self.settings.clip_norm
        moved = {}
        for name in sorted(total):
            noisy = total[name] + deviation * normal(total[name].size).reshape(total[name].shape)
            like = np.asarray(state[name])
            moved[name] = (like.astype(np.float64) + noisy / num_asked).astype(like.dtype)
        report: dict[str, Any] = {
            "clipped_by_server": num_clipped,
            "denominator": num_asked,
            "noise_deviation": deviation / num_asked,
        }
        return Outcome(self.strategy.stepped(state, moved), {"privacy": report})

    def _sum(self, state: Arrays, updates: Iterable[SiteUpdate]) -> tuple[dict[str, np.ndarray], int]:
        """Return the clipped sum by name, float64, and how many updates were over the bound as they arrived."""
        bound, num_over = self.settings.clip_norm, 0
        total: dict[str, np.ndarray] = {}
        for update in updates:
            # A change is taken against what that site was sent, which need not be the state bit for bit.
            given = self.strategy.given.get(update.site)
            start = state if given is None else given.known
            norm = change_norm(update.arrays, start)
            num_over += not norm <= bound * (1 + ROUNDING)
            factor = clip_factor(norm, bound)
            for name, value in update.arrays.items():
                if not is_floating(value):
                    continue
                into = total.setdefault(name, np.zeros(value.shape))
                if factor > 0:
                    into += factor * (value.astype(np.float64) - np.asarray(start[name], np.float64))
        if not all(math.isfinite(float(np.sum(np.abs(part)))) for part in total.values()):
            raise ValueError("the sum of clipped updates is not finite")
        return total, num_over
