"""The asynchronous arm: sites of four speeds, each arrival applied at once by delayed Nesterov."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from benchmarks.pretrain_parity.federation import BATCH, SITES, Arm, Trainer, Warm
from benchmarks.pretrain_parity.model import Corpus
from compression import Layout, encode
from compression.payload import change, decode_update, delta_layout
from strategies.outer.delayed import DelayedNesterov, dylu_steps
from strategies.outer.weights import stale_factor
from umbel.seeds import derive_seed

# Inner steps a unit of time.
SPEEDS = {0: 1.0, 1: 0.9, 2: 0.7, 3: 0.5}


class Delayed:
    """Sites train from the state they were sent last; the server never waits. Way down exact, as wide as the state."""

    def __init__(self, arm: Arm, corpus: Corpus, seed: int, warm: Warm, total: int) -> None:
        self.arm, self.corpus, self.seed = arm, corpus, seed
        self.layout = Layout.from_arrays(warm.params)
        self.rule = DelayedNesterov(*arm.outer, arm.delay)
        self.theta = {n: a.copy() for n, a in warm.params.items()}
        self.trainers = [Trainer(seed, warm, arm.rate, total) for _ in range(SITES)]
        self.steps = dylu_steps(arm.period, {str(s): v for s, v in SPEEDS.items()})
        self.bytes_up = self.bytes_down = 0
        self.ages: list[int] = []

    def run(self, steps: int) -> int:
        """Let arrivals happen until the sites have done `steps` steps each on average; returns their number."""
        left, arrivals = steps * SITES, 0
        bases: dict[int, tuple[Any, int]] = dict.fromkeys(range(SITES), (self.theta, 0))
        queue = [(self.steps[str(site)] / SPEEDS[site], site) for site in range(SITES)]
        heapq.heapify(queue)
        while left > 0:
            now, site = heapq.heappop(queue)
            base, version = bases[site]
            count = min(self.steps[str(site)], left)
            trainer = self.trainers[site]
            trainer.write(base)
            trainer.train([self.corpus.batch(self.seed, site, trainer.step + k, BATCH) for k in range(count)])
            left -= count
            self._arrive(site, base, arrivals - version, arrivals)
            arrivals += 1
            bases[site] = (self.theta, arrivals)
            heapq.heappush(queue, (now + self.steps[str(site)] / SPEEDS[site], site))
        return arrivals

    def _arrive(self, site: int, base: dict[str, np.ndarray], age: int, number: int) -> None:
        up, layout = self.arm.codecs[0], self.layout
        delta = change(self.trainers[site].read(), base, layout)
        frame = encode(delta, delta_layout(layout), up, seed=derive_seed(self.seed, "codec", number))
        self.bytes_up += len(frame)
        self.bytes_down += sum(a.nbytes for a in base.values())
        received = change(decode_update(frame, layout, up, base), base, layout)
        self.ages.append(age)
        self.theta = self.rule.arrive(self.theta, received, stale_factor(age, 0.25, 16))

    def served(self) -> Trainer:
        """Return a model that holds the server's state."""
        self.trainers[0].write(self.theta)
        return self.trainers[0]
