"""The arm with fragments: one quarter of the model at a time, mixed in some steps after it was sent."""

from __future__ import annotations

import numpy as np

from benchmarks.pretrain_parity.federation import BATCH, SITES, Arm, Arrays, Trainer, Warm
from benchmarks.pretrain_parity.model import Corpus
from compression import Layout, encode
from compression.downlink import Downlink
from compression.payload import change, decode_update, delta_layout
from strategies.aggregation.mean import WeightedMean
from strategies.outer.streaming import Fragmented, Schedule, fragments, mix
from umbel.seeds import derive_seed


class Streaming:
    """All sites of the arm; `arm.fragments` parts, `arm.overlap` steps, mixed half and half."""

    def __init__(self, arm: Arm, corpus: Corpus, seed: int, warm: Warm, total: int) -> None:
        self.arm, self.corpus, self.seed, self.total = arm, corpus, seed, total
        self.schedule = Schedule(arm.period, arm.fragments, arm.overlap)
        parts = fragments({n: a.nbytes for n, a in warm.params.items()}, arm.fragments)
        self.server = Fragmented(warm.params, parts, *arm.outer)
        self.layouts = [Layout.from_arrays({n: warm.params[n] for n in names}) for names in parts]
        self.links = [
            Downlink({n: warm.params[n] for n in names}, layout, arm.codecs[1], keep_versions=1)
            for names, layout in zip(parts, self.layouts, strict=True)
        ]
        self.trainers = [Trainer(seed, warm, arm.rate, total) for _ in range(SITES)]
        self.bytes_up = self.bytes_down = 0

    def run(self, steps: int) -> int:
        """Train for `steps` steps; returns the number of fragments sent."""
        sent = 0
        for step in range(1, steps + 1):
            for site, trainer in enumerate(self.trainers):
                trainer.train([self.corpus.batch(self.seed, site, trainer.step, BATCH)])
            # A merge is mixed in before the next fragment leaves.
            mixed = self.schedule.mixed_after(step)
            leaving = self.schedule.sent_after(step)
            if leaving is not None:
                self._send(leaving, step)
                sent += 1
            if mixed is not None:
                self._mix(mixed)
        return sent

    def _send(self, part: int, step: int) -> None:
        layout, link, up = self.layouts[part], self.links[part], self.arm.codecs[0]
        names, base = self.server.parts[part], link.shadow
        mean = WeightedMean({n: self.server.state[n] for n in names})
        for site, trainer in enumerate(self.trainers):
            local = {n: a for n, a in trainer.read().items() if n in set(names)}
            delta = change(local, base, layout)
            seed = derive_seed(self.seed, "codec", step, site)
            frame = encode(delta, delta_layout(layout), up, seed=seed)
            self.bytes_up += len(frame)
            mean.add(decode_update(frame, layout, up, {n: self.server.state[n] for n in names}), 1.0)
        moved = self.server.merge(part, mean.result())
        version = link.publish(moved, seed=derive_seed(self.seed, "down", step))
        self.bytes_down += SITES * len(version.frame)

    def _mix(self, part: int) -> None:
        for trainer in self.trainers:
            local: Arrays = trainer.read()
            for name, merged in self.links[part].shadow.items():
                local[name] = mix(local[name], merged, 0.5)
            trainer.write(local)

    def served(self) -> Trainer:
        """Return a model that holds the global values of all fragments."""
        self.trainers[0].write({n: np.array(a) for link in self.links for n, a in link.shadow.items()})
        return self.trainers[0]
