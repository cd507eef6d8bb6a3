"""Full pretraining between two rounds: H steps of the inner optimiser over blocks of a tokenised corpus.

    one step   batch-size x accumulation blocks;  g = d/dtheta (sum of token losses / tokens of the whole step)
    rate       of the run's global step, which the server counts
    ends       after H steps, after `train.round-seconds`, or at the deadline, whichever comes first

(DiLoCo's inner loop: Douillard et al. 2023, arXiv 2311.08105, algorithm 1.) Which blocks: those of a lease the server
gave (`umbel.data.leases`), else the site's own order from its cursor. Both are functions of seed, site and position,
so a round that is done again does the same. Micro-batches are no part of the result but for the order of sums: when
memory runs out they become smaller.

Several processes share a step's micro-batches (`client_app.ranks`). What is not done here: starting them
(`client_app.several`), merging, outer steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from client_app import ranks, shards
from client_app.clock import Clock
from client_app.inner import Inner
from client_app.precision import autocast
from client_app.tasks.sft import TrainResult, pull_back, refuse_non_finite
from umbel.config.schema import Config
from umbel.data.cursor import Cursor, take
from umbel.data.leases import Span, positions
from umbel.errors import Refusal, RefusalKind
from umbel.local_step import rate_at
from umbel.models.block_loss import block_loss
from umbel.models.state import named_trainable, read_state
from umbel.seeds import derive_seed


@dataclass(frozen=True)
class Work:
    """What an instruction asks of a site; `lease` is None where the site chooses its own blocks."""

    site: str
    round_index: int
    first_step: int
    total_steps: int
    local_steps: int
    cursor: Cursor
    lease: Sequence[Span] | None = None


def pretrain(
    model: Any,
    blocks: Any,
    config: Config,
    clock: Clock,
    work: Work,
    *,
    moments: dict[str, np.ndarray],
    precision: str,
    max_tokens: int,
) -> TrainResult:
    """Train `model` in place and return the result; `blocks` are the training blocks (`umbel.data.tokens.Blocks`).

    Raises Refusal: NON_FINITE, DEADLINE when not one step was possible, NO_DATA for an empty lease.
    """
    import torch

    settings = config.train
    compile_once(model, settings.compile)
    sharded = shards.is_sharded(model)
    named = shards.named(model) if sharded else named_trainable(model, "full")
    inner = Inner(model, named, settings)
    inner.restore(moments)
    anchors = [p.detach().clone() for p in inner.parameters] if settings.proximal_mu > 0 else []
    model.train()
    torch.manual_seed(derive_seed(config.run.seed, "dropout", work.site, work.round_index))
    source = Source(work, len(blocks), config)
    began, loss_sum, tokens, steps = time.monotonic(), 0.0, 0, 0
    while steps < source.limit:
        boxed = settings.round_seconds > 0 and time.monotonic() - began >= settings.round_seconds
        if ranks.anywhere(clock.expired or (boxed and steps > 0)):
            break
        rate = rate_at(settings, work.first_step + steps, work.total_steps)
        picked = blocks.stack(source.next())
        step_loss, step_tokens = one_step(
            model, picked, inner, config, rate, precision=precision, max_tokens=max_tokens
        )
        if not math.isfinite(step_loss):
            raise Refusal(
                RefusalKind.NON_FINITE, f"the local loss became {step_loss} in step {steps + 1} of the round"
            )
        pull_back(inner.parameters, anchors, rate * settings.proximal_mu)
        loss_sum += step_loss
        tokens += step_tokens
        steps += 1
        clock.note(steps, tokens)
    # The gradients are as large as the model, and the update has to be made beside it.
    inner.zero_grad()
    model.eval()
    if steps == 0:
        raise Refusal(RefusalKind.DEADLINE, "no step could be finished before the deadline")
    arrays = shards.whole(model) if sharded else read_state(model, "full")
    refuse_non_finite(arrays)
    kept = inner.save() if settings.optimizer_state == "keep" else {}
    partial = steps < work.local_steps
    return TrainResult(arrays, kept, source.cursor, tokens, steps, loss_sum / max(1, tokens), partial)


class Source:
    """Positions of the blocks of each step, from a lease or from the site's own cursor."""

    def __init__(self, work: Work, num_blocks: int, config: Config) -> None:
        self.cursor, self._work, self._num, self._seed = work.cursor, work, num_blocks, config.run.seed
        self._size = config.train.batch_size * config.train.accumulation
        self.limit = work.local_steps
        self._leased: np.ndarray | None = None
        self._at = 0
        if work.lease is not None:
            self._leased = positions(work.lease, num_blocks, seed=self._seed)
            self.limit = min(self.limit, len(self._leased) // self._size)
            if self.limit == 0:
                raise Refusal(RefusalKind.NO_DATA, "the lease of this round has not one step of blocks")

    def next(self) -> np.ndarray:
        """Return the positions of the next step's blocks, int64."""
        if self._leased is not None:
            found = self._leased[self._at : self._at + self._size]
            self._at += self._size
            return found
        found, self.cursor = take(self.cursor, self._num, self._size, seed=self._seed, site=self._work.site)
        return found


def one_step(
    model: Any,
    picked: np.ndarray,
    inner: Inner,
    config: Config,
    rate: float,
    *,
    precision: str,
    max_tokens: int,
) -> tuple[float, int]:
    """Do one optimiser step over `picked`, int64 [blocks, L + 1]; return (summed loss, target tokens)."""
    import torch

    length = picked.shape[1] - 1
    tokens = picked.shape[0] * length
    size = max(1, min(config.train.batch_size, max_tokens // length))
    parts = [picked[i : i + size] for i in range(0, len(picked), size)]
    inner.zero_grad()
    total = 0.0
    sharded = shards.is_sharded(model)
    mine = ranks.share(parts)
    # A sharded forward is a collective: a rank with a part less goes through one that does not count.
    idle = ranks.most(len(mine)) - len(mine) if sharded else 0
    # Shards average over the ranks what is to be summed.
    scale = (ranks.size() if sharded else 1) / tokens
    for part, share in [*((part, 1.0) for part in mine), *[(parts[0][:1], 0.0)] * idle]:
        with autocast(model, precision):
            out = block_loss(model, part)
        (out.loss * (share * scale)).backward()
        total += share * float(out.loss.detach())
    total = ranks.total(total)
    if not sharded:
        ranks.sum_gradients(inner.parameters)
    if not math.isfinite(total):
        return total, tokens
    if config.train.clip_norm > 0:
        norm = torch.nn.utils.clip_grad_norm_(inner.parameters, config.train.clip_norm)
        norm = norm.full_tensor() if sharded else norm
        if not bool(torch.isfinite(norm)):
            raise Refusal(RefusalKind.NON_FINITE, "the gradient is not finite")
    inner.step(rate)
    return total, tokens


def compile_once(model: Any, backend: str) -> None:
    """Compile the model's forward in place: parameter names stay as they are, no wrapper adds a prefix."""
    if backend != "off" and getattr(model, "_umbel_compiled", "") != backend:
        model.compile(backend=backend)
        model._umbel_compiled = backend
