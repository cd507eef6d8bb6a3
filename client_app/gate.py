"""The site's door: every message passes here before the work and every answer before it leaves.

    enter   policy: bundle, run, round, rows       -> a broken rule is a refusal of kind "policy" and an audit line
    leave   policy: metrics, norm, noise -> signed manifest -> record of what left

`gated(through)` wraps whoever does the work. In `umbel site start` the installed code wraps the bundle's worker: then
the server's code cannot go round it. With the stock SuperNode the bundle wraps itself, and only honest code obeys
(`umbel.policy`). Simulated sites pass too; without a policy only the records are made.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from client_app.identity import default_state_dir
from client_app.sent import Outbox
from umbel.config import from_json
from umbel.errors import ConfigError, Refusal, RefusalKind, UmbelError
from umbel.ledger.manifest import METRIC
from umbel.messages import JOIN, STATUS_OK, TRAIN, Instruction, Reply, parse_json, plain_metrics
from umbel.policy import SitePolicy, policy_path, read_policy
from umbel.policy_checks import (
    BundleFacts,
    allowed_metrics,
    bundle_problems,
    data_problems,
    round_problems,
    run_problems,
)

log = logging.getLogger("umbel.site")

Through = Callable[..., tuple[Any, bytes | None]]
# What joining and merging cannot do without; every other metric is the policy's to let through.
NEEDED: tuple[str, ...] = (
    "model",
    "tokenizer",
    "adapter",
    "layout",
    "rank",
    "adapted_modules",
    "trainable_parameters",
    "key",
    "held",
)
_INSTALLED = re.compile(r"(?P<publisher>[^.]+)\.[^.]+\..+\.(?P<hash>[0-9a-f]{8})$")


def own_bundle() -> BundleFacts:
    """Return what this code knows of the bundle it came in: Flower's name of the folder, 8 digits of the hash."""
    found = _INSTALLED.match(Path(__file__).resolve().parents[1].name)
    return BundleFacts(found["hash"], found["publisher"], False) if found else BundleFacts("", "", False)


def gated(through: Through, *, bundle: BundleFacts | None = None) -> Through:
    """Return `through` with the site's checks around it; `bundle` is given by code that is not part of it."""

    def call(
        kind: str,
        instruction: Instruction,
        frame: bytes | None,
        *,
        node_config: Mapping[str, Any],
        node_id: int,
    ) -> tuple[Reply, bytes | None]:
        began = time.monotonic()
        gate = Gate(node_config, node_id, instruction, bundle)
        try:
            allowed = gate.enter(kind, frame)
            reply, update = through(kind, allowed, frame, node_config=node_config, node_id=node_id)
            return gate.leave(kind, reply, update, frame, began)
        except Refusal as refusal:
            return gate.refused(kind, refusal, len(frame or b"")), None

    return call


class Gate:
    """One message's way in and out."""

    def __init__(
        self,
        node_config: Mapping[str, Any],
        node_id: int,
        instruction: Instruction,
        bundle: BundleFacts | None,
    ) -> None:
        self.node_config, self.instruction = node_config, instruction
        self.bundle = bundle or own_bundle()
        self.name = str(node_config.get("name") or instruction.site or f"node-{node_id}").strip()
        self.state_dir = Path(str(node_config.get("state-dir") or default_state_dir())).expanduser()
        self.policy: SitePolicy | None = None

    def outbox(self, site: str = "") -> Outbox:
        key = str(self.node_config.get("signing-key") or "").strip()
        return Outbox(self.state_dir, site or self.name, key=Path(key).expanduser() if key else None)

    def enter(self, kind: str, frame: bytes | None) -> Instruction:
        """Return the instruction, its time cut to what the policy allows; raises Refusal POLICY."""
        path = policy_path(self.node_config)
        if path is None:
            return self.instruction
        try:
            self.policy = policy = read_policy(path)
            config = from_json(self.instruction.config)
            directives = parse_json(self.instruction.directives, "directives")
        except ConfigError as error:
            raise Refusal(RefusalKind.POLICY, f"the site's policy cannot be applied: {error}") from None
        except (UmbelError, ValueError) as error:
            raise Refusal(RefusalKind.POLICY, f"the message cannot be read: {error}") from None
        problems = bundle_problems(policy, self.bundle) + run_problems(policy, config)
        problems += data_problems(policy, self.node_config, config)
        if kind == TRAIN:
            spent = self.outbox().spent_seconds(self.instruction.run)
            problems += round_problems(policy, self.instruction.round, directives, spent)
        if problems:
            raise Refusal(RefusalKind.POLICY, "; ".join(problems))
        if kind == JOIN:
            facts = {"run": self.instruction.run, "bundle": self.bundle.hash, "model": config.model.name}
            self.outbox().note("run_admitted", task=config.run.task, method=config.run.method, **facts)
        limit = policy.run.max_seconds_a_round or self.instruction.remaining_seconds
        return dataclasses.replace(
            self.instruction, remaining_seconds=min(self.instruction.remaining_seconds, limit)
        )

    def leave(
        self, kind: str, reply: Reply, update: bytes | None, received: bytes | None, began: float
    ) -> tuple[Reply, bytes | None]:
        """Return what leaves: metrics that may, an update within its bounds, signed and recorded."""
        outbox = self.outbox(reply.site)
        try:
            metrics = parse_json(reply.metrics, "metrics")
            if reply.status == STATUS_OK:
                metrics, update = self._within(outbox, metrics, update, received)
                if kind == JOIN:
                    metrics["key"] = outbox.public_key()
                elif kind == TRAIN and update is not None:
                    metrics[METRIC] = outbox.sign(self.instruction, reply, update)
                reply = dataclasses.replace(reply, metrics=plain_metrics(metrics))
            seconds, size = time.monotonic() - began, len(received or b"")
            outbox.keep(kind, self.instruction, reply, update, seconds=seconds, received_bytes=size)
        except (OSError, UmbelError, ValueError) as error:
            if self.policy is not None or isinstance(error, Refusal):
                raise (
                    error
                    if isinstance(error, Refusal)
                    else Refusal(
                        RefusalKind.POLICY,
                        f"what leaves could not be checked or recorded ({type(error).__name__})",
                    )
                ) from None
            log.warning("no record of this answer: %s: %s", type(error).__name__, error)
        return reply, update

    def _within(
        self, outbox: Outbox, metrics: dict[str, Any], update: bytes | None, received: bytes | None
    ) -> tuple[dict[str, Any], bytes | None]:
        policy = self.policy
        if policy is None:
            return metrics, update
        kept = allowed_metrics(policy, metrics, NEEDED)
        where = {"run": self.instruction.run, "round": self.instruction.round}
        if len(kept) < len(metrics):
            outbox.note("metrics_withheld", names=sorted(set(metrics) - set(kept)), **where)
        if update is not None and (policy.update.max_norm or policy.update.noise_std):
            from client_app.bounded import bound_update

            update, done = bound_update(policy.update, update, received, outbox.folder(self.instruction.run))
            if len(done) > 1:
                outbox.note("update_bounded", **done, **where)
        return kept, update

    def refused(self, kind: str, refusal: Refusal, received_bytes: int) -> Reply:
        """Return the reply that says so, after writing it into the audit log."""
        i = self.instruction
        log.warning("%s of round %d refused: %s", kind, i.round, refusal)
        if refusal.kind is RefusalKind.POLICY:
            facts = {"run": i.run, "round": i.round, "attempt": i.attempt, "bundle": self.bundle.hash}
            try:
                self.outbox().note("refused", kind=kind, reason=refusal.reason, **facts)
                counted = {"t": time.time(), "run": i.run, "round": i.round, "status": str(refusal.kind)}
                self.outbox().count(kind, counted | {"seconds": 0.0}, received_bytes)
            except OSError as error:
                log.warning("the audit log cannot be written: %s", error)
        return Reply(
            run=i.run,
            round=i.round,
            attempt=i.attempt,
            base=i.base,
            site=self.name,
            status=str(refusal.kind),
            reason=refusal.reason,
        )


def audit_text(record: Mapping[str, Any]) -> str:
    """Return one audit record as a line for people."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.get("t", 0)))
    rest = {k: v for k, v in record.items() if k not in ("t", "event", "prev", "hash")}
    return f"{when} {record.get('event', '')} {json.dumps(rest, sort_keys=True)}"
