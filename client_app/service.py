"""From an instruction to a reply, without Flower: the whole behaviour of a site in one call.

Nothing that goes wrong here raises out: the server gets a typed refusal with one line of reason, never a
traceback and never a row of data. The order of a training round is that of `client_app.state`:

    select the state the server names -> verify the base -> work -> encode -> stage -> answer
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import compression
from client_app.clock import Clock
from client_app.drill import Drill
from client_app.exchange import kept, layouts, load, outgoing, start_of
from client_app.identity import Identity, identify
from client_app.outgoing import encode_update
from client_app.state import KEEP_VERSIONS, SiteState, prune_runs
from client_app.tasks.work import local_work, spent
from client_app.workbench import SiteData, SiteModel, Workbench
from umbel import __version__
from umbel.config import Config, from_json
from umbel.digest import short, state_crc
from umbel.errors import ConfigError, DataError, ModelError, Refusal, RefusalKind, UmbelError
from umbel.exchange import Exchange
from umbel.faults import FaultPlan
from umbel.messages import EVALUATE, JOIN, TRAIN, Instruction, Reply, parse_json, plain_metrics
from umbel.seeds import derive_seed

log = logging.getLogger("umbel.site")

VERSIONED = ("flwr", "torch", "transformers", "peft", "numpy")


class Service:
    """One site's answers; keeps the workbench warm between calls in the same process."""

    def __init__(self, *, memory_bytes: int = 0) -> None:
        self.bench = Workbench(memory_bytes=memory_bytes)
        self.plan = FaultPlan.from_env()

    def handle(
        self,
        kind: str,
        instruction: Instruction,
        frame: bytes | None,
        *,
        node_config: Mapping[str, Any],
        node_id: int,
        clock: Clock | None = None,
    ) -> tuple[Reply, bytes | None]:
        """Answer one instruction: (reply, update frame or None). Never raises.

        `clock` is the caller's, where the time began to run before this call.
        """
        clock = clock or Clock(instruction.remaining_seconds)
        name = str(node_config.get("name") or instruction.site or f"node-{node_id}")
        try:
            config = from_json(instruction.config)
            site = identify(node_config, node_id, config)
            site = replace(site, rank=int(node_config.get("rank") or 0))
            name = site.name
            if kind == JOIN:
                return self._join(instruction, config, site), None
            if instruction.site != site.name:
                raise Refusal(
                    RefusalKind.REFUSED,
                    f"the instruction is for site {instruction.site!r}, this is {site.name!r}",
                )
            if kind == TRAIN:
                return self._train(instruction, config, site, frame, clock)
            if kind == EVALUATE:
                return self._evaluate(instruction, config, site, frame, clock), None
            raise Refusal(RefusalKind.REFUSED, f"unknown message type {kind!r}")
        except Exception as error:
            refusal = as_refusal(error)
            # The traceback stays at the site; the server gets one line.
            log.warning(
                "round %s refused: %s", instruction.round, refusal, exc_info=refusal.kind == "exception"
            )
            return blank_reply(instruction, name, status=str(refusal.kind), reason=refusal.reason), None

    def _join(self, instruction: Instruction, config: Config, site: Identity) -> Reply:
        from umbel.models.described import described
        from umbel.models.fingerprint import adapter_fingerprint, base_fingerprint, tokenizer_fingerprint

        spec, settings = described(config)
        prune_runs(site.state_dir)
        model, load_seconds = self.bench.model(config)
        data = self.bench.data(config, site, model.tokenizer)
        facts = {
            "versions": {"umbel": __version__, **versions()},
            "rows_train": len(data.train),
            "rows_heldout": len(data.heldout),
            "counters": data.counters,
            "model": base_fingerprint(spec),
            "tokenizer": tokenizer_fingerprint(model.tokenizer),
            "adapter": adapter_fingerprint(settings, model.modules) if model.modules else "",
            "layout": model.layout.digest(),
            "adapted_modules": len(model.modules),
            "trainable_parameters": model.layout.numel,
            "device": model.device,
            "rank": site.rank,
            "seconds": {"load": load_seconds},
        }
        log.info(
            "site %s joins with %d training and %d held-out rows",
            site.name,
            len(data.train),
            len(data.heldout),
        )
        return blank_reply(instruction, site.name, metrics=plain_metrics(facts))

    def _prepare(
        self,
        instruction: Instruction,
        config: Config,
        site: Identity,
        frame: bytes | None,
        remembered: Mapping[str, Any],
    ) -> tuple[SiteModel, SiteData, float, dict[str, Any]]:
        """Load model and data and put the instruction's state into the model, verified against its name.

        Returns also the arrays received. `remembered` are the site's own, for methods that keep some here.
        """
        from umbel.models.described import described
        from umbel.models.state import write_state

        set_threads(config.train.threads)
        model, load_seconds = self.bench.model(config)
        data = self.bench.data(config, site, model.tokenizer)
        if frame is None:
            raise Refusal(RefusalKind.REFUSED, "the instruction carries no state")
        exchange, settings = exchange_in(instruction), described(config)[1]
        layout, _ = layouts(model, settings, exchange)
        if instruction.layout != layout.digest():
            raise Refusal(
                RefusalKind.REFUSED,
                f"the server's tensors (layout {short(instruction.layout)}) are not this site's "
                f"({short(layout.digest())}): the models or the versions of peft differ",
            )
        arrays = compression.decode(frame, layout)
        got = state_crc(arrays)
        if got != instruction.base:
            raise Refusal(
                RefusalKind.REFUSED,
                f"the state received is {short(got)}, the server meant {short(instruction.base)}",
            )
        if config.train.mode == "lora":
            load(model, settings, exchange, arrays, remembered, config.run.seed)
        else:
            write_state(model.model, arrays, config.train.mode)
        return model, data, load_seconds, arrays

    def _train(
        self, instruction: Instruction, config: Config, site: Identity, frame: bytes | None, clock: Clock
    ) -> tuple[Reply, bytes]:
        from client_app.precision import resolve_precision
        from client_app.tasks.evaluate import evaluate
        from umbel.data.cursor import Cursor
        from umbel.models.described import described

        settled = read_settled(instruction)
        directives = parse_json(instruction.directives, "directives")
        exchange, settings = exchange_in(instruction), described(config)[1]
        state = SiteState(site.state_dir, instruction.run, site.name)
        drill = Drill(self.plan, site.name, instruction.round)
        with state.exclusive():
            snapshot, found = state.select(settled)
            if not found:
                log.warning("the state of round %s is gone; training goes on from an empty one", settled)
            started = time.monotonic()
            model, data, load_seconds, received = self._prepare(
                instruction, config, site, frame, snapshot.arrays
            )
            precision = resolve_precision(config.train.precision, model.device)
            seconds = {"load": load_seconds, "prepare": time.monotonic() - started - load_seconds}
            heldout = None
            if instruction.evaluate and data.heldout and not exchange.again:
                mark = time.monotonic()
                heldout = evaluate(
                    model.model,
                    data.heldout,
                    clock,
                    batch_size=config.eval.batch_size,
                    max_tokens=config.train.max_tokens,
                    packing=model.packing,
                    precision=precision,
                )
                seconds["eval"] = time.monotonic() - mark
            mark = time.monotonic()
            drill.at("before_train")
            drill.between_steps(clock)
            cursor = Cursor(**snapshot.meta["cursor"]) if "cursor" in snapshot.meta else Cursor(0, 0)
            log.debug("round %s: training begins", instruction.round)
            result = with_smaller_batches(
                lambda max_tokens: local_work(
                    exchange.trains,
                    model.model,
                    data.train,
                    config,
                    clock,
                    site=site.name,
                    round_index=instruction.round,
                    first_step=int(directives["first_step"]),
                    total_steps=int(directives["total_steps"]),
                    cursor=cursor,
                    remembered=snapshot,
                    precision=precision,
                    max_tokens=max_tokens,
                    packing=model.packing,
                    local_steps=int(directives.get("local_steps", config.train.local_steps)),
                ),
                restore=lambda: self._prepare(instruction, config, site, frame, snapshot.arrays),
                max_tokens=config.train.max_tokens,
            )
            seconds["train"] = time.monotonic() - mark
            mark = time.monotonic()
            update = outgoing(model, settings, exchange, result.arrays, received, config.run.seed)
            encoded = encode_update(
                instruction,
                drill.spoil(update),
                layouts(model, settings, exchange)[1],
                start_of(model, settings, exchange, received, snapshot.arrays),
                state.folder,
                feedback=float(directives.get("feedback", 0.0)),
                seed=derive_seed(int(directives.get("codec_seed", 0)), site.name),
            )
            out = encoded.frame
            seconds["encode"] = time.monotonic() - mark
            state.stage(
                instruction.round,
                instruction.attempt,
                {"cursor": asdict(result.cursor), "spent": spent(result)},
                {**result.moments, **kept(exchange, result.arrays)},
            )
            # As many versions as the server may fall back by: its checkpoints may be rounds apart.
            state.prune(settled, keep=max(KEEP_VERSIONS, config.run.checkpoint_every + 3))
        if result.tokens == 0:
            raise Refusal(RefusalKind.NO_DATA, "no supervised token was trained on")
        metrics: dict[str, Any] = {
            "seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "precision": precision,
            "state_found": found,
            "epoch": result.cursor.epoch,
        }
        if heldout is not None:
            metrics["heldout"] = heldout._asdict()
        if encoded.residual_ratio is not None:
            metrics["residual_ratio"] = encoded.residual_ratio
        loss = float("nan") if drill.at("before_send") else result.loss
        drill.on_the_way()
        return (
            blank_reply(
                instruction,
                site.name,
                weight=float(result.tokens),
                tokens=result.tokens,
                steps=result.steps,
                loss=loss,
                partial=result.partial,
                payload=encoded.payload,
                metrics=plain_metrics(metrics),
            ),
            out,
        )

    def _export_own(self, model: SiteModel, config: Config, state: SiteState) -> None:
        """Write the adapter as this site uses it: its own factors and the shared ones."""
        from umbel.models.described import described
        from umbel.models.export import save_adapter
        from umbel.models.state import read_state

        spec, settings = described(config)
        card = f"# {config.run.method}: the adapter of site {state.folder.name}\n\nShared and own factors.\n"
        save_adapter(state.folder / "adapter", read_state(model.model, "lora"), settings, spec, card=card)

    def _evaluate(
        self, instruction: Instruction, config: Config, site: Identity, frame: bytes | None, clock: Clock
    ) -> Reply:
        from client_app.precision import resolve_precision
        from client_app.tasks.evaluate import evaluate

        state = SiteState(site.state_dir, instruction.run, site.name)
        own = state.select(read_settled(instruction))[0].arrays
        model, data, load_seconds, _ = self._prepare(instruction, config, site, frame, own)
        if exchange_in(instruction).own:
            self._export_own(model, config, state)
        if not data.heldout:
            raise Refusal(RefusalKind.NO_DATA, "this site holds no rows out")
        mark = time.monotonic()
        sums = evaluate(
            model.model,
            data.heldout,
            clock,
            batch_size=config.eval.batch_size,
            max_tokens=config.train.max_tokens,
            packing=model.packing,
            precision=resolve_precision(config.train.precision, model.device),
        )
        if sums is None:
            raise Refusal(RefusalKind.DEADLINE, "the held-out rows were not finished before the deadline")
        metrics = {
            "heldout": sums._asdict(),
            "seconds": {"load": load_seconds, "eval": time.monotonic() - mark},
        }
        return blank_reply(instruction, site.name, metrics=plain_metrics(metrics))


def exchange_in(instruction: Instruction) -> Exchange:
    """Return what this instruction exchanges; the adapter or model both ways where it says nothing."""
    return Exchange.from_dict(parse_json(instruction.directives, "directives").get("exchange", {}))


def blank_reply(instruction: Instruction, site: str, **fields: Any) -> Reply:
    """Return a reply that echoes the identity of the work."""
    return Reply(
        run=instruction.run,
        round=instruction.round,
        attempt=instruction.attempt,
        base=instruction.base,
        site=site,
        **fields,
    )


def read_settled(instruction: Instruction) -> tuple[int, int]:
    """Return (round, attempt) of this site's last committed update; (0, 0) for none."""
    value = parse_json(instruction.settled, "settled")
    return int(value[0]), int(value[1])


def as_refusal(error: Exception) -> Refusal:
    """Return the typed refusal for any error; only our own messages are quoted, others by their type."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, compression.NonFiniteError):
        return Refusal(RefusalKind.NON_FINITE, str(error))
    if isinstance(error, DataError):
        return Refusal(RefusalKind.NO_DATA, str(error))
    if isinstance(error, (ConfigError, ModelError, UmbelError)):
        return Refusal(RefusalKind.REFUSED, str(error))
    if is_out_of_memory(error):
        return Refusal(
            RefusalKind.OOM, "out of memory; lower train.max-tokens, train.batch-size or data.max-length"
        )
    # A library's message may quote a row of data, so only the type and the place leave the site.
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" at {place.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{place.tb_lineno}" if place else ""
    return Refusal(RefusalKind.EXCEPTION, f"{type(error).__name__}{where}; the site's log has the traceback")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and (
        "not enough memory" in str(error) or "out of memory" in str(error)
    )


def with_smaller_batches(work: Any, *, restore: Any, max_tokens: int) -> Any:
    """Run `work(max_tokens)`; when memory runs out, restore the state and try once with half as many tokens."""
    try:
        return work(max_tokens)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    log.warning("out of memory with %d tokens a sequence, trying %d", max_tokens, max_tokens // 2)
    restore()
    return work(max(16, max_tokens // 2))


def set_threads(threads: int) -> None:
    """Fix the number of CPU threads where the run asks for it: sums then have one order everywhere."""
    if threads > 0:
        import torch

        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def versions() -> dict[str, str]:
    """Return the installed versions that must agree between sites."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def peak_memory_bytes() -> int:
    """Return the peak resident set of this process in bytes (plus the peak of the GPU where one is used)."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        peak += torch.cuda.max_memory_allocated()
    return int(peak)
