"""From an instruction to a reply, without Flower: the whole behaviour of a site in one call.

Nothing that goes wrong here raises out: the server gets a typed refusal with one line of reason, never a
traceback and never a row of data.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from client_app.clock import Clock
from client_app.held import newest_held
from client_app.identity import Identity, identify
from client_app.prepare import Prepared, exchange_in, prepare, read_settled
from client_app.replies import as_refusal, blank_reply
from client_app.site_rank import asked_rank, free_bytes, largest_rank, wants_negotiation
from client_app.state import SiteState, prune_runs
from client_app.train_round import score, train_round
from client_app.workbench import Workbench
from umbel.config import Config, from_json
from umbel.errors import Refusal, RefusalKind
from umbel.faults import FaultPlan
from umbel.messages import EVALUATE, JOIN, TRAIN, Instruction, Reply, parse_json, plain_metrics
from umbel.telemetry.environment import versions

log = logging.getLogger("umbel.site")

# Those that must agree between sites.
VERSIONED = ("umbel", "flwr", "torch", "transformers", "peft", "numpy")


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
            site = replace(site, rank=asked_rank(node_config))
            name = site.name
            if config.run.task == "split":
                return self._split(kind, instruction, config, site, frame, clock, node_config)
            if kind == JOIN:
                return self._join(instruction, config, site, node_config), None
            if instruction.site != site.name:
                raise Refusal(
                    RefusalKind.REFUSED,
                    f"the instruction is for site {instruction.site!r}, this is {site.name!r}",
                )
            if kind == TRAIN:
                return train_round(self.bench, self.plan, instruction, config, site, frame, clock)
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

    def _split(
        self,
        kind: str,
        instruction: Instruction,
        config: Config,
        site: Identity,
        frame: bytes | None,
        clock: Clock,
        node_config: Mapping[str, Any],
    ) -> tuple[Reply, bytes | None]:
        """Answer for a site that holds only its own blocks of the model."""
        from client_app.split_round import SplitSite, join_facts

        if kind == JOIN:
            prune_runs(site.state_dir)
            found = {name: there or "absent" for name, there in versions(VERSIONED).items()}
            facts = {**join_facts(self.bench, config, site), "versions": found}
            return blank_reply(instruction, site.name, metrics=plain_metrics(facts)), None
        if instruction.site != site.name or kind != TRAIN:
            raise Refusal(
                RefusalKind.REFUSED, f"a split run has no {kind!r} for site {instruction.site!r} here"
            )
        return SplitSite(self.bench, self.plan, instruction, config, site, clock, node_config).answer(frame)

    def _join(
        self, instruction: Instruction, config: Config, site: Identity, node_config: Mapping[str, Any]
    ) -> Reply:
        from umbel.models.described import described
        from umbel.models.fingerprint import adapter_fingerprint, base_fingerprint, tokenizer_fingerprint

        spec, settings = described(config)
        prune_runs(site.state_dir)
        model, load_seconds = self.bench.model(config)
        data = self.bench.data(config, site, model.tokenizer)
        rank = site.rank
        if model.modules and wants_negotiation(node_config):
            layers = [(m.in_features, m.out_features) for m in model.modules]
            rank = largest_rank(layers, config.lora.rank, free_bytes(str(model.device)))
        facts = {
            "versions": {name: found or "absent" for name, found in versions(VERSIONED).items()},
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
            **data.facts,
            "rank": rank,
            "seconds": {"load": load_seconds},
        }
        if parse_json(instruction.directives, "directives").get("held"):
            folder = SiteState(site.state_dir, instruction.run, site.name).folder
            facts["held"] = newest_held(folder, model, config.train.mode)
        log.info(
            "site %s joins with %d training and %d held-out rows",
            site.name,
            len(data.train),
            len(data.heldout),
        )
        return blank_reply(instruction, site.name, metrics=plain_metrics(facts))

    def _evaluate(
        self, instruction: Instruction, config: Config, site: Identity, frame: bytes | None, clock: Clock
    ) -> Reply:
        state = SiteState(site.state_dir, instruction.run, site.name)
        own = state.select(read_settled(instruction))[0].arrays
        ready = prepare(self.bench, instruction, config, site, frame, own)
        if exchange_in(instruction).own:
            export_own(ready, config, state)
        if not ready.data.heldout:
            raise Refusal(RefusalKind.NO_DATA, "this site holds no rows out")
        mark = time.monotonic()
        sums = score(ready, config, clock)
        if sums is None:
            raise Refusal(RefusalKind.DEADLINE, "the held-out rows were not finished before the deadline")
        seconds = {"load": ready.load_seconds, "eval": time.monotonic() - mark}
        metrics = {"heldout": sums._asdict(), "seconds": seconds}
        return blank_reply(instruction, site.name, metrics=plain_metrics(metrics))


def export_own(ready: Prepared, config: Config, state: SiteState) -> None:
    """Write the adapter as this site uses it: its own factors and the shared ones."""
    from umbel.models.described import described
    from umbel.models.export import save_adapter
    from umbel.models.state import read_state

    spec, settings = described(config)
    card = f"# {config.run.method}: the adapter of site {state.folder.name}\n\nShared and own factors.\n"
    save_adapter(state.folder / "adapter", read_state(ready.model.model, "lora"), settings, spec, card=card)
