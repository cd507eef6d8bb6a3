"""One arm of the comparison, in process: real strategy, codecs, error feedback and downlink; no Flower, no engine.

    site     held <- follow(downlink);  H inner AdamW steps;  frame <- encode_update(local - held), residual on disk
    server   theta <- strategy.aggregate(theta, updates);  next frame <- downlink.publish(theta)

Inner AdamW moments stay at the sites; the inner rate follows one cosine over all steps, warm phase included. Bytes are
the lengths of the frames, every site's up and every site's copy of the broadcast. Data-parallel training is one AdamW
on the sites' batches together; its traffic is counted as fp32 gradients up and fp32 averages down, every step.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pretrain_parity.model import Corpus, make_model
from client_app.outgoing import encode_update
from compression import Layout
from compression.downlink import Downlink, digest_of, follow
from compression.payload import decode_update, is_exact
from strategies import SiteUpdate, build
from strategies.robust_merge import RobustMerge
from umbel.config import resolve
from umbel.messages import Instruction
from umbel.seeds import derive_seed, generator

SITES, BATCH, WARM_STEPS, STEPS, WARMUP = 4, 8, 400, 640, 40
WARM_RATE, BETAS, DECAY, CLIP = 3e-3, (0.9, 0.95), 0.01, 1.0
EVAL_WINDOWS = 768
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Arm:
    """What is varied. `kind`: parallel, solo, rounds, streaming or delayed; `rate` is the inner peak rate."""

    name: str
    kind: str = "rounds"
    rate: float = 3e-3
    period: int = 20
    settings: tuple[str, ...] = ()
    cold: bool = False
    sites: int = SITES
    # Share of site-rounds whose update is lost; own shards; one site that sends -10 times its change.
    drop: float = 0.0
    shards: bool = False
    liar: bool = False
    # For kinds "streaming" and "delayed" alone: (rate, momentum) of the outer rule, codecs up and down.
    outer: tuple[float, float] = (1.0, 0.0)
    codecs: tuple[str, str] = ("exact", "exact")
    fragments: int = 4
    overlap: int = 0
    delay: int = 4


@dataclass
class Warm:
    """Parameters and AdamW moments every arm starts from, after `step` steps."""

    params: Arrays
    moments: Any = None
    step: int = 0


@dataclass
class Result:
    """Losses are nats a byte; bytes are of all sites over the whole arm."""

    arm: str
    seed: int
    heldout: float
    tune: float
    bytes_up: int
    bytes_down: int
    rounds: int
    steps: int
    seconds: float
    extra: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """A model with its AdamW; one a site, or one for all in data-parallel training."""

    def __init__(self, seed: int, warm: Warm, rate: float, total: int) -> None:
        import torch

        self.model = make_model(seed)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY, fused=True
        )
        self.rate, self.total, self.step = rate, total, warm.step
        self.write(warm.params)
        if warm.moments is not None:
            self.optimiser.load_state_dict(warm.moments)

    def read(self) -> Arrays:
        """Return copies of the parameters."""
        return {n: p.detach().numpy().copy() for n, p in self.model.named_parameters()}

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put parameters into the model."""
        import torch

        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(arrays[name])))

    def train(self, batches: list[np.ndarray]) -> float:
        """Do one step a batch and return the mean loss."""
        import torch

        losses = []
        for batch in batches:
            progress = self.step / self.total
            factor = min(1.0, (self.step + 1) / WARMUP) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
            for group in self.optimiser.param_groups:
                group["lr"] = self.rate * factor
            loss = self.model.loss(torch.from_numpy(batch))
            self.optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimiser.step()
            self.step += 1
            losses.append(float(loss.detach()))
        return float(np.mean(losses))

    def score(self, corpus: Corpus, split: str) -> float:
        """Return the loss over fixed windows of a split."""
        import torch

        windows = torch.from_numpy(corpus.windows(split, EVAL_WINDOWS))
        with torch.no_grad():
            return float(np.mean([float(self.model.loss(part)) for part in windows.split(128)]))


def joint(corpus: Corpus, seed: int, step: int) -> np.ndarray:
    """Return the batches of all sites of one step together."""
    return np.concatenate([corpus.batch(seed, site, step, BATCH) for site in range(SITES)])


def cold_start(seed: int) -> Warm:
    """Return the model as drawn, without a warm phase."""
    return Warm({n: p.detach().numpy().copy() for n, p in make_model(seed).named_parameters()})


def warm_up(corpus: Corpus, seed: int, steps: int = WARM_STEPS, total: int = WARM_STEPS + STEPS) -> Warm:
    """Return the common start: `steps` steps of data-parallel training."""
    import copy

    trainer = Trainer(seed, cold_start(seed), WARM_RATE, total)
    trainer.train([joint(corpus, seed, step) for step in range(steps)])
    return Warm(trainer.read(), copy.deepcopy(trainer.optimiser.state_dict()), trainer.step)


def run_arm(arm: Arm, corpus: Corpus, seed: int, warm: Warm, steps: int = STEPS) -> Result:
    """Train one arm for `steps` steps after `warm` and score it."""
    began = time.process_time()
    total = warm.step + steps
    if arm.kind in ("parallel", "solo"):
        trainer = Trainer(seed, warm, arm.rate, total)
        for step in range(warm.step, total):
            whole = arm.kind == "parallel"
            trainer.train([joint(corpus, seed, step) if whole else corpus.batch(seed, 0, step, BATCH)])
        size = sum(a.nbytes for a in warm.params.values())
        wire = steps * SITES * size if arm.kind == "parallel" else 0
        found, extra, rounds = trainer, {}, steps
        up = down = wire
    elif arm.kind in ("streaming", "delayed"):
        from benchmarks.pretrain_parity.delayed import Delayed
        from benchmarks.pretrain_parity.streaming import Streaming

        other = (Streaming if arm.kind == "streaming" else Delayed)(arm, corpus, seed, warm, total)
        rounds = other.run(steps)
        found, up, down = other.served(), other.bytes_up, other.bytes_down
        extra = {"mean_staleness": float(np.mean(other.ages))} if isinstance(other, Delayed) else {}
    else:
        federation = Federation(arm, corpus, seed, warm, total)
        rounds = steps // arm.period
        with tempfile.TemporaryDirectory(prefix="umbel-parity-") as scratch:
            for index in range(1, rounds + 1):
                federation.round(index, Path(scratch))
        found, extra = federation.served(), federation.report()
        up, down = federation.bytes_up, federation.bytes_down
    return Result(
        arm.name,
        seed,
        found.score(corpus, "heldout"),
        found.score(corpus, "tune"),
        up,
        down,
        rounds,
        steps,
        time.process_time() - began,
        extra,
    )


class Federation:
    """Server and sites of one arm."""

    def __init__(self, arm: Arm, corpus: Corpus, seed: int, warm: Warm, total: int) -> None:
        self.arm, self.corpus, self.seed = arm, corpus, seed
        # The engine checks codecs at its own start; `compression.down` is applied here by `Downlink`.
        self.down = next((s.split("=", 1)[1] for s in arm.settings if s.startswith("down=")), "exact")
        settings = [s for s in arm.settings if not s.startswith("down=")]
        self.config = resolve(None, ["train.mode=full", "run.method=fedavg", f"run.seed={seed}", *settings])
        self.layout = Layout.from_arrays(warm.params)
        self.strategy = build(self.config, self.layout, {})
        self.merge = (
            RobustMerge(self.config, self.strategy) if self.config.clients.merge != "mean" else self.strategy
        )
        self.outcomes: list[list[list]] = [[] for _ in range(arm.sites)]
        self.theta = {n: a.copy() for n, a in warm.params.items()}
        self.downlink = Downlink(self.theta, self.layout, self.down, keep_versions=4)
        self.held = [{n: a.copy() for n, a in warm.params.items()} for _ in range(arm.sites)]
        self.trainers = [Trainer(seed, warm, arm.rate, total) for _ in range(arm.sites)]
        self.bytes_up = self.bytes_down = 0
        self.ratios: list[float] = []
        self.metrics: list[dict[str, Any]] = []

    def round(self, index: int, scratch: Path) -> None:
        """Local work, frames up, outer step, frame down."""
        frames = [self._site(site, index, scratch / f"site{site}") for site in range(self.arm.sites)]
        tokens = self.arm.period * BATCH
        lost = generator(self.seed, "drop", index).random(len(frames)) < self.arm.drop
        for i, is_lost in enumerate(lost):
            self.outcomes[i] = [[index, 1, "dropped" if is_lost else "applied"]]
        updates = (
            SiteUpdate(f"site{i}", float(tokens), self._received(frame, i), tokens, self.arm.period)
            for i, frame in enumerate(frames)
            if not lost[i]
        )
        if not lost.all():
            self.theta = self.merge.aggregate(self.theta, updates).state
        version = self.downlink.publish(
            self.theta, seed=derive_seed(self.seed, "down", index), round_index=index
        )
        self.bytes_up += sum(len(f) for f in frames)
        self.bytes_down += self.arm.sites * len(version.frame)

    def _site(self, site: int, index: int, folder: Path) -> bytes:
        folder.mkdir(exist_ok=True)
        held = self.held[site]
        update = self.downlink.catch_up(digest_of(held, self.layout))
        held = self.held[site] = follow(held, self.layout, update)
        trainer = self.trainers[site]
        trainer.write(held)
        steps = range(trainer.step, trainer.step + self.arm.period)
        shards = SITES if self.arm.shards else 1
        trainer.train([self.corpus.batch(self.seed, site, step, BATCH, shards) for step in steps])
        c = self.config.compression
        order = Instruction(
            run=f"{self.arm.name}-{self.seed}",
            round=index,
            attempt=1,
            base=update.digest,
            site=f"site{site}",
            remaining_seconds=1e6,
            up=c.up,
            outcomes=json.dumps(self.outcomes[site]),
        )
        made = encode_update(
            order,
            trainer.read(),
            self.layout,
            held,
            folder,
            feedback=c.feedback,
            seed=derive_seed(self.seed, "codec", index, site),
        )
        if made.residual_ratio is not None:
            self.ratios.append(made.residual_ratio)
        return made.frame

    def _received(self, frame: bytes, site: int) -> Arrays:
        """Return the server's state plus the site's change; the change was taken against the shadow."""
        values = self._values(frame)
        if self.arm.liar and site == 0:
            return {n: self.theta[n] - np.float32(10) * (values[n] - self.theta[n]) for n in values}
        return values

    def _values(self, frame: bytes) -> Arrays:
        up = self.config.compression.up
        if not is_exact(up):
            return decode_update(frame, self.layout, up, self.theta)
        values = decode_update(frame, self.layout, up, self.downlink.shadow)
        if is_exact(self.down):
            return values
        return {n: self.theta[n] + (values[n] - self.downlink.shadow[n]) for n in values}

    def served(self) -> Trainer:
        """Return a model that holds what the sites hold after the last broadcast."""
        self.trainers[0].write(self.downlink.shadow)
        return self.trainers[0]

    def report(self) -> dict[str, Any]:
        """Return what is worth logging beside loss and bytes."""
        gap = sum(float(((self.theta[n] - self.downlink.shadow[n]) ** 2).sum()) for n in self.theta)
        found: dict[str, Any] = {"shadow_gap": gap**0.5}
        if self.ratios:
            found["residual_ratio"] = float(np.mean(self.ratios[-self.arm.sites :]))
        return found
