"""One training round of a site, in the order of `client_app.state`:

select the state the server names -> verify the base -> work -> encode -> stage -> answer
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from client_app.clock import Clock
from client_app.drill import Drill
from client_app.exchange import kept, outgoing, start_of
from client_app.identity import Identity
from client_app.outgoing import Encoded, encode_update
from client_app.prepare import Prepared, prepare, read_settled
from client_app.replies import blank_reply, is_out_of_memory
from client_app.state import KEEP_VERSIONS, SiteState, Snapshot
from client_app.tasks.work import local_work, spent
from client_app.workbench import Workbench
from umbel.config import Config
from umbel.data.cursor import Cursor
from umbel.errors import Refusal, RefusalKind
from umbel.faults import FaultPlan
from umbel.messages import Instruction, Reply, parse_json, plain_metrics
from umbel.seeds import derive_seed

log = logging.getLogger("umbel.site")


def train_round(
    bench: Workbench,
    plan: FaultPlan,
    instruction: Instruction,
    config: Config,
    site: Identity,
    frame: bytes | None,
    clock: Clock,
) -> tuple[Reply, bytes]:
    """Train on the instruction's state and return (reply, update frame); raises Refusal where that is impossible."""
    settled = read_settled(instruction)
    directives = parse_json(instruction.directives, "directives")
    state = SiteState(site.state_dir, instruction.run, site.name)
    drill = Drill(plan, site.name, instruction.round)
    watch = Watch()
    with state.exclusive():
        snapshot, found = state.select(settled)
        if not found:
            log.warning("the state of round %s is gone; training goes on from an empty one", settled)

        def start() -> Prepared:
            return prepare(bench, instruction, config, site, frame, snapshot.arrays)

        ready = start()
        watch.lap("prepare", less=ready.load_seconds)
        watch.seconds["load"] = ready.load_seconds
        heldout = None
        if instruction.evaluate and ready.data.heldout and not ready.exchange.again:
            heldout = score(ready, config, clock)
            watch.lap("eval")
        drill.at("before_train")
        drill.between_steps(clock)
        log.debug("round %s: training begins", instruction.round)
        result = with_smaller_batches(
            lambda max_tokens: work(
                ready, config, instruction, directives, snapshot, clock, site, max_tokens
            ),
            restore=start,
            max_tokens=config.train.max_tokens,
        )
        watch.lap("train")
        encoded = encode(ready, config, instruction, directives, result.arrays, snapshot, state, drill)
        watch.lap("encode")
        state.stage(
            instruction.round,
            instruction.attempt,
            {"cursor": asdict(result.cursor), "spent": spent(result)},
            {**result.moments, **kept(ready.exchange, result.arrays)},
        )
        # As many versions as the server may fall back by: its checkpoints may be rounds apart.
        state.prune(settled, keep=max(KEEP_VERSIONS, config.run.checkpoint_every + 3))
    if result.tokens == 0:
        raise Refusal(RefusalKind.NO_DATA, "no supervised token was trained on")
    metrics: dict[str, Any] = {
        "seconds": watch.seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "precision": ready.precision,
        "state_found": found,
        "epoch": result.cursor.epoch,
    }
    if heldout is not None:
        metrics["heldout"] = heldout._asdict()
    if encoded.residual_ratio is not None:
        metrics["residual_ratio"] = encoded.residual_ratio
    loss = float("nan") if drill.at("before_send") else result.loss
    drill.on_the_way()
    reply = blank_reply(
        instruction,
        site.name,
        weight=float(result.tokens),
        tokens=result.tokens,
        steps=result.steps,
        loss=loss,
        partial=result.partial,
        payload=encoded.payload,
        metrics=plain_metrics(metrics),
    )
    return reply, encoded.frame


def score(ready: Prepared, config: Config, clock: Clock) -> Any:
    """Return the loss sums of the model as it is on this site's held-out rows; None when time ran out."""
    from client_app.tasks.evaluate import evaluate

    if config.run.task == "pretrain":
        from client_app.tasks.evaluate import evaluate_blocks

        return evaluate_blocks(
            ready.model.model,
            ready.data.heldout,
            clock,
            batch_size=config.eval.batch_size,
            precision=ready.precision,
        )
    return evaluate(
        ready.model.model,
        ready.data.heldout,
        clock,
        batch_size=config.eval.batch_size,
        max_tokens=config.train.max_tokens,
        packing=ready.model.packing,
        precision=ready.precision,
    )


def work(
    ready: Prepared,
    config: Config,
    instruction: Instruction,
    directives: dict[str, Any],
    snapshot: Snapshot,
    clock: Clock,
    site: Identity,
    max_tokens: int,
) -> Any:
    """Do the local work the exchange names, from the cursor of the site's last committed round."""
    cursor = Cursor(**snapshot.meta["cursor"]) if "cursor" in snapshot.meta else Cursor(0, 0)
    if config.run.task == "pretrain":
        return pretraining(ready, config, instruction, directives, snapshot, clock, cursor, max_tokens)
    return local_work(
        ready.exchange.trains,
        ready.model.model,
        ready.data.train,
        config,
        clock,
        site=site.name,
        round_index=instruction.round,
        first_step=int(directives["first_step"]),
        total_steps=int(directives["total_steps"]),
        cursor=cursor,
        remembered=snapshot,
        precision=ready.precision,
        max_tokens=max_tokens,
        packing=ready.model.packing,
        local_steps=int(directives.get("local_steps", config.train.local_steps)),
    )


def pretraining(
    ready: Prepared,
    config: Config,
    instruction: Instruction,
    directives: dict[str, Any],
    snapshot: Snapshot,
    clock: Clock,
    cursor: Cursor,
    max_tokens: int,
) -> Any:
    """Do the inner steps of pretraining, in this process or in several."""
    from client_app.several import pretrain_anywhere
    from client_app.tasks.pretrain import Work

    lease = directives.get("lease")
    ordered = Work(
        instruction.site,
        instruction.round,
        int(directives["first_step"]),
        int(directives["total_steps"]),
        int(directives.get("local_steps", config.train.local_steps)),
        cursor,
        None if lease is None else tuple((int(e), int(a), int(b)) for e, a, b in lease),
    )
    return pretrain_anywhere(
        ready.model.model,
        ready.data.train,
        config,
        clock,
        ordered,
        moments=dict(snapshot.arrays),
        precision=ready.precision,
        max_tokens=max_tokens,
    )


def encode(
    ready: Prepared,
    config: Config,
    instruction: Instruction,
    directives: dict[str, Any],
    trained: dict[str, Any],
    snapshot: Snapshot,
    state: SiteState,
    drill: Drill,
) -> Encoded:
    """Return the update as it leaves: what the form up names of the trained tensors, in the instruction's codec."""
    update = outgoing(ready.model, ready.settings, ready.exchange, trained, ready.received, config.run.seed)
    return encode_update(
        instruction,
        drill.spoil(update),
        ready.up_layout,
        start_of(ready.model, ready.settings, ready.exchange, ready.received, snapshot.arrays),
        state.folder,
        feedback=float(directives.get("feedback", 0.0)),
        clip_norm=float(directives.get("clip_norm", 0.0)),
        seed=derive_seed(int(directives.get("codec_seed", 0)), instruction.site),
        segment=ready.exchange.up.part,
    )


class Watch:
    """Seconds of each part of a round; `lap` ends a part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.monotonic()

    def lap(self, part: str, *, less: float = 0.0) -> None:
        """Write down the time since the last lap, less what is counted elsewhere."""
        now = time.monotonic()
        self.seconds[part] = now - self._mark - less
        self._mark = now


def with_smaller_batches(work: Callable[[int], Any], *, restore: Callable[[], Any], max_tokens: int) -> Any:
    """Run `work(max_tokens)`; when memory runs out, restore the state and try once with half as many tokens."""
    try:
        return work(max_tokens)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    log.warning("out of memory with %d tokens a sequence, trying %d", max_tokens, max_tokens // 2)
    restore()
    return work(max(16, max_tokens // 2))


def peak_memory_bytes() -> int:
    """Return the peak resident set of this process in bytes (plus the peak of the GPU where one is used)."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        peak += torch.cuda.max_memory_allocated()
    return int(peak)
