"""The round engine: every round is a transaction.

    OPEN(r)    choose sites, a function of (run seed, round, skips so far); one instruction and one frame each
    COLLECT    until the policy says so; each reply is validated before it is kept, a bad one is dropped and named
    COMMIT     one new state from the accepted updates, in canonical order of site names
    SKIP       below the quorum: the state stays bit for bit; the round keeps its number and gets a new attempt
    ABORT      after `run.max-consecutive-skips` of them, with a sentence that says why

It owns its loop on `push_messages` / `pull_messages`, because Flower's own wait is not a deadline. Time and sleep
are arguments, so that hundreds of rounds run in a second of a test. Nothing a site sends raises out of here, and
every wait has a bound. What it does not do: it knows no model and no task; evaluation data stay at the sites.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

import compression
from compression import Layout
from compression.flower import array_to_frame, frame_to_array
from server_app.heldout import combine
from server_app.joining import Joining
from server_app.mailbox import Delivery, Mailbox, Parcel
from server_app.policy import RoundPolicy, Verdict, adaptive_deadline, num_asked
from server_app.sites import Registry, Site
from server_app.spool import Entry, Spool
from server_app.validate import (
    NORM_WINDOW,
    Expected,
    Rejected,
    check_header,
    check_norm,
    check_weight,
    decode_update,
    read_heldout,
    read_metrics,
    update_norm,
)
from strategies import SiteUpdate, UmbelStrategy
from umbel.config import Config, to_json
from umbel.digest import state_crc
from umbel.errors import UmbelError
from umbel.messages import (
    CONTROL_RECORD,
    EVALUATE,
    FRAME_RECORD,
    STATUS_OK,
    TRAIN,
    Instruction,
    MessageError,
    Reply,
    control_of,
    from_record,
    to_record,
)
from umbel.seeds import derive_seed, generator

log = logging.getLogger("umbel.server")

# The site stops this long before the server does, on top of its own margin: polls and the upload take time.
TRAVEL_SECONDS = 5.0
# A message outlives its round by this: then the SuperLink itself drops what nobody can use.
TTL_MARGIN_SECONDS = 60.0


class RunAborted(UmbelError):
    """Too many rounds in a row brought no commit; the text says what every site answered."""


@dataclass
class Ask:
    """What one train message in flight was sent for. `expected` is compared with the reply's header."""

    expected: Expected
    # The state the site started from; kept only where a late update may be re-based on it.
    state: Mapping[str, np.ndarray] | None


@dataclass
class OpenRound:
    """Everything about the round being collected."""

    index: int
    attempt: int
    policy: RoundPolicy
    asked: list[str]
    began: float
    answered: set[str] = field(default_factory=set)
    spool: Spool = field(default_factory=Spool)
    rejected: list[dict[str, str]] = field(default_factory=list)
    heldout: dict[str, dict[str, float]] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    quorum_at: float | None = None
    bytes_down: int = 0

    @property
    def accepted(self) -> int:
        """Accepted updates of this round's own cohort; late ones of earlier rounds are not counted."""
        return sum(not entry.late for entry in self.spool.entries.values())


class Engine:
    """Runs rounds over a strategy; the global state is `self.state`, replaced whole at each commit."""

    def __init__(
        self,
        config: Config,
        strategy: UmbelStrategy,
        layout: Layout,
        state: dict[str, np.ndarray],
        mailbox: Mailbox,
        joining: Joining,
        *,
        run: str,
        on_event: Callable[..., None],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        poll_seconds: float = 0.25,
        fault: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.config, self.strategy, self.layout, self.state = config, strategy, layout, state
        self.mailbox, self.joining, self.run, self._event = mailbox, joining, run, on_event
        self._now, self._sleep, self._poll, self._fault = now, sleep, poll_seconds, fault
        self.round = 0
        # Attempts of the next round that were opened already, by an earlier life of this server too.
        self.attempts_opened = 0
        self.norms: list[float] = []
        self.arrivals: list[float] = []
        self.last_heldout: dict[str, Any] | None = None
        self._site_config = to_json(config)

    @property
    def registry(self) -> Registry:
        """The sites of this run."""
        return self.joining.registry

    def run_round(self) -> dict[str, Any]:
        """Commit the next round and return its record; skips are retried up to the limit.

        Raises RunAborted with every site's reason when the limit is reached.
        """
        skips: list[str] = []
        limit = self.config.run.max_consecutive_skips
        while True:
            record = self._attempt(len(skips))
            if record["outcome"] == "commit":
                return record
            skips.append(record["why"])
            if len(skips) >= limit:
                raise RunAborted(
                    f"round {self.round + 1} brought no commit in {limit} attempts. Last: {skips[-1]}. "
                    "The last good state is kept; mend the sites and resume with --set run.resume=auto."
                )

    def _attempt(self, skips: int) -> dict[str, Any]:
        index = self.round + 1
        self.attempts_opened += 1
        attempt = self.attempts_opened
        chosen = self._choose(index, skips)
        goal = self._goal(len(chosen))
        policy = RoundPolicy(goal, self._quorum(goal), self._deadline(), self.config.clients.grace_seconds)
        self._event(
            "round_opened",
            # Durable before anything is sent: a server that comes back must not use this attempt again.
            fsync=True,
            round=index,
            attempt=attempt,
            selected=[s.name for s in chosen],
            goal=policy.goal,
            quorum=policy.quorum,
            deadline_seconds=policy.deadline_seconds,
        )
        opened = OpenRound(index, attempt, policy, [s.name for s in chosen], self._now())
        try:
            dispatch_seconds = self._dispatch(opened, chosen)
            self._fault("dispatch")
            verdict = self._collect(opened)
            collected = self._now()
            if verdict is Verdict.COMMIT:
                self._fault("before_commit")
                return self._commit(opened, dispatch_seconds, collected)
            return self._skip(opened, dispatch_seconds, collected)
        finally:
            opened.spool.close()

    def _choose(self, index: int, skips: int) -> list[Site]:
        """Return the sites asked in this round, by name; waits, within the start timeout, for at least a quorum."""
        c = self.config.clients
        began = self._now()
        while True:
            online = self.joining.online()
            self.joining.ask_new(online, c.start_timeout_seconds)
            self.joining.collect()
            available = self.registry.available(online, index)
            goal = self._goal(len(available))
            if len(available) >= max(1, self._quorum(goal)):
                break
            if self._now() - began >= c.start_timeout_seconds:
                raise RunAborted(
                    f"round {index}: only {len(available)} of the {max(1, self._quorum(goal))} sites that a quorum "
                    f"needs are online after {c.start_timeout_seconds:g} s. "
                    f"{self.joining.reasons()} The last good state is kept."
                )
            self._sleep(self._poll)
        num = num_asked(goal, c.over_provision, len(available))
        if num >= len(available):
            return available
        order = generator(self.config.run.seed, "sites", index, skips).permutation(len(available))
        return sorted((available[i] for i in order[:num]), key=lambda site: site.name)

    def _goal(self, available: int) -> int:
        wanted = self.config.clients.goal
        return min(wanted, available) if wanted else available

    def _quorum(self, goal: int) -> int:
        """Return the quorum; the default is half, rounded up, of the goal and of the sites the run started with.

        The second half matters when sites vanish: three sites must not silently become one.
        """
        c = self.config.clients
        return c.quorum or max(1, -(-goal // 2), -(-(c.goal or c.minimum) // 2))

    def _deadline(self) -> float:
        c = self.config.clients
        if not c.adaptive_deadline:
            return c.deadline_seconds
        return adaptive_deadline(self.arrivals, c.min_deadline_seconds, c.deadline_seconds)

    def _instruction(
        self, site: Site, index: int, attempt: int, base: str, seconds: float, **extra: Any
    ) -> Instruction:
        return Instruction(
            run=self.run,
            round=index,
            attempt=attempt,
            base=base,
            site=site.name,
            remaining_seconds=max(1.0, seconds - TRAVEL_SECONDS),
            up=self.config.compression.up,
            config=self._site_config,
            settled=json.dumps(list(site.settled)),
            layout=self.layout.digest(),
            **extra,
        )

    def _dispatch(self, opened: OpenRound, chosen: list[Site]) -> float:
        began = self._now()
        base = state_crc(self.state)
        frame = compression.encode(
            self.state, self.layout, self.config.compression.down, round_index=opened.index, base=base
        )
        record = ArrayRecord({"frame": frame_to_array(frame)})
        directives = self.strategy.directives(self.round)
        directives["codec_seed"] = derive_seed(self.config.run.seed, "codec", opened.index)
        every = self.config.eval.every
        evaluate = opened.index == 1 or (every > 0 and (opened.index - 1) % every == 0)
        keep_state = self.state if self.config.clients.late == "weight" else None
        seconds = opened.policy.deadline_seconds
        items: list[tuple[str, int, Any, Message]] = []
        for site in chosen:
            order = self._instruction(
                site,
                opened.index,
                opened.attempt,
                base,
                seconds,
                evaluate=evaluate,
                directives=json.dumps(directives, sort_keys=True),
                outcomes=json.dumps(opened.outcomes),
            )
            content = RecordDict({FRAME_RECORD: record, CONTROL_RECORD: to_record(order)})
            message = Message(
                content, site.node, TRAIN, ttl=seconds + TTL_MARGIN_SECONDS, group_id=str(opened.index)
            )
            expected = Expected(self.run, opened.index, opened.attempt, base, site.name)
            items.append((site.name, site.node, Ask(expected, keep_state), message))
            opened.bytes_down += len(frame)
        failed = self.mailbox.send(items)
        lost = {f.parcel.site for f in failed}
        for site in chosen:
            if site.name not in lost:
                self._event("dispatched", round=opened.index, site=site.name, bytes=len(frame))
        for delivery in failed:
            opened.bytes_down -= len(frame)
            self._fail(opened, delivery)
        return self._now() - began

    def _collect(self, opened: OpenRound) -> Verdict:
        first = True
        while True:
            for delivery in self.mailbox.poll(lambda parcel: isinstance(parcel.tag, Ask)):
                self._take(opened, delivery)
                if first and opened.spool.entries:
                    self._fault("first_reply")
                    first = False
            # A node that connects in mid-round is asked who it is now, so that it can take part in the next one.
            self.joining.ask_new(self.joining.online(), self.config.clients.start_timeout_seconds)
            self.joining.collect()
            now = self._now()
            if opened.quorum_at is None and opened.accepted >= opened.policy.quorum:
                opened.quorum_at = now
            verdict = opened.policy.decide(
                elapsed_seconds=now - opened.began,
                asked=len(opened.asked),
                answered=len(opened.answered),
                accepted=opened.accepted,
                since_quorum_seconds=None if opened.quorum_at is None else now - opened.quorum_at,
            )
            if verdict is not Verdict.WAIT:
                return verdict
            self._sleep(self._poll)

    def _take(self, opened: OpenRound, delivery: Delivery) -> None:
        """Put one delivery where it belongs: accepted, rejected, failed or late."""
        ask: Ask = delivery.parcel.tag
        is_late = ask.expected.round != opened.index or ask.expected.attempt != opened.attempt
        if delivery.message is None:
            if not is_late:
                self._fail(opened, delivery)
            return
        site = delivery.parcel.site
        try:
            reply = from_record(Reply, control_of(delivery.message.content))
            check_header(reply, ask.expected)
            if is_late:
                self._take_late(opened, ask, reply, delivery.message)
            else:
                opened.answered.add(site)
                self._accept(opened, reply, delivery.message, self.state)
        except MessageError as error:
            self._reject(opened, site, Rejected("header", str(error)), is_late, ask.expected.round)
        except Rejected as rejected:
            self._reject(opened, site, rejected, is_late, ask.expected.round)

    def _accept(
        self, opened: OpenRound, reply: Reply, message: Message, base: Mapping[str, np.ndarray]
    ) -> None:
        site = self.registry.sites[reply.site]
        metrics = read_metrics(reply)
        sums = read_heldout(metrics)
        if sums:
            opened.heldout[reply.site] = sums
        weight = check_weight(reply, self._max_weight(site))
        if self.config.clients.weighting == "uniform":
            weight = 1.0
        frame = frame_of(message)
        arrays = decode_update(frame, self.layout)
        norm = update_norm(arrays, base, self.strategy.scales)
        check_norm(norm, self.norms, self.config.clients.max_norm_ratio)
        entry = Entry(reply, weight, norm, len(frame), state_crc(arrays))
        opened.spool.add(reply.site, entry, frame)
        self.arrivals.append(self._now() - opened.began)
        self._event(
            "update_accepted",
            round=opened.index,
            site=reply.site,
            weight=weight,
            norm=norm,
            crc=entry.crc,
            tokens=reply.tokens,
            steps=reply.steps,
            loss=reply.loss,
            bytes=len(frame),
            seconds=metrics.get("seconds"),
            partial=reply.partial,
            late=False,
            peak_memory_bytes=metrics.get("peak_memory_bytes"),
            precision=metrics.get("precision"),
            state_found=metrics.get("state_found"),
            heldout=sums,
        )

    def _max_weight(self, site: Site) -> float | None:
        """Return the most target tokens a round of this site can hold; a larger claim is capped."""
        t, d = self.config.train, self.config.data
        return float(t.local_steps * t.batch_size * t.accumulation * d.max_length)

    def _take_late(self, opened: OpenRound, ask: Ask, reply: Reply, message: Message) -> None:
        """Use an update of an earlier round with a smaller weight, or drop it: by configuration."""
        c = self.config.clients
        age = opened.index - ask.expected.round
        if c.late != "weight" or age > c.late_rounds or age < 1 or ask.state is None:
            raise Rejected("late", f"arrived {age} rounds after its own", strike=False)
        arrays = decode_update(frame_of(message), self.layout)
        norm = update_norm(arrays, ask.state, self.strategy.scales)
        check_norm(norm, self.norms, c.max_norm_ratio)
        weight = check_weight(reply, None) if c.weighting == "tokens" else 1.0
        weight *= (1.0 + age) ** -c.staleness_exponent
        moved = rebase(arrays, ask.state, self.state)
        frame = compression.encode(moved, self.layout, "exact", round_index=opened.index)
        key = f"{reply.site}\x00late-{ask.expected.round:06d}"
        opened.spool.add(key, Entry(reply, weight, norm, len(frame), state_crc(moved), late=True), frame)
        self._event(
            "update_accepted",
            round=opened.index,
            site=reply.site,
            weight=weight,
            norm=norm,
            tokens=reply.tokens,
            steps=reply.steps,
            loss=reply.loss,
            bytes=len(frame),
            partial=reply.partial,
            late=True,
            of_round=ask.expected.round,
        )

    def _reject(self, opened: OpenRound, site: str, rejected: Rejected, is_late: bool, of_round: int) -> None:
        if not is_late:
            opened.answered.add(site)
            opened.rejected.append({"site": site, "kind": rejected.kind, "reason": rejected.reason})
        until = 0
        if rejected.strike and not is_late:
            until = self.registry.strike(site, opened.index)
        self._event(
            "update_rejected",
            round=of_round,
            site=site,
            kind=rejected.kind,
            reason=rejected.reason,
            late=is_late,
            quarantined_until=until or None,
        )
        log.warning(
            "round %d: site %s: %s%s",
            of_round,
            site,
            rejected,
            f"; quarantined until round {until}" if until else "",
        )

    def _fail(self, opened: OpenRound, delivery: Delivery) -> None:
        site = delivery.parcel.site
        opened.answered.add(site)
        opened.rejected.append({"site": site, "kind": "failed", "reason": delivery.failure})
        self._event("site_failed", round=opened.index, site=site, kind="failed", reason=delivery.failure)
        log.warning("round %d: site %s: %s", opened.index, site, delivery.failure)

    def _commit(self, opened: OpenRound, dispatch_seconds: float, collected: float) -> dict[str, Any]:
        entries = opened.spool.ordered()
        weights = [e.weight for e in entries]
        expected_weight = statistics.fmean(weights) * len(opened.asked)
        updates = (
            SiteUpdate(e.reply.site, e.weight, arrays, e.reply.tokens, e.reply.steps)
            for e, arrays in opened.spool.decoded(lambda frame: decode_update(frame, self.layout))
        )
        outcome = self.strategy.aggregate(self.state, updates, expected_weight=expected_weight)
        bad = next((n for n, a in outcome.state.items() if not finite(a)), None)
        if bad is not None:
            opened.rejected.append(
                {"site": "*", "kind": "non_finite", "reason": f"aggregate of {bad} is not finite"}
            )
            return self._skip(opened, dispatch_seconds, collected)
        self.state = outcome.state
        self.round, self.attempts_opened = opened.index, 0
        self.norms = [*self.norms, *(e.norm for e in entries if not e.late)][-NORM_WINDOW:]
        self.arrivals = self.arrivals[-NORM_WINDOW:]
        for entry in entries:
            if not entry.late:
                self.registry.sites[entry.reply.site].settled = (opened.index, opened.attempt)
        self._fault("after_commit")
        tokens = sum(e.reply.tokens for e in entries)
        record = self._record(opened, "commit", dispatch_seconds, collected)
        record["train_loss"] = sum(e.reply.loss * e.reply.tokens for e in entries) / tokens
        record["tokens"] = tokens
        record.update(outcome.metrics)
        self.mailbox.forget(self._is_stale)
        return record

    def _is_stale(self, parcel: Parcel) -> bool:
        """Tell whether nobody would use the reply to this parcel any more."""
        ask = parcel.tag
        return isinstance(ask, Ask) and ask.expected.round + self.config.clients.late_rounds < self.round + 1

    def _skip(self, opened: OpenRound, dispatch_seconds: float, collected: float) -> dict[str, Any]:
        record = self._record(opened, "skip", dispatch_seconds, collected)
        silent = [f"{name}: no answer" for name in record["missing"]]
        reasons = [f"{r['site']}: {r['kind']}: {r['reason']}" for r in opened.rejected]
        waited = collected - opened.began
        record["why"] = (
            f"{opened.accepted} of {len(opened.asked)} updates accepted in {waited:.0f} s, "
            f"{opened.policy.quorum} needed ({'; '.join([*reasons, *silent]) or 'nobody was asked'})"
        )
        self._event("round_committed", fsync=True, **record)
        log.warning("round %d, attempt %d: skipped: %s", opened.index, opened.attempt, record["why"])
        return record

    def _record(
        self, opened: OpenRound, outcome: str, dispatch_seconds: float, collected: float
    ) -> dict[str, Any]:
        entries = opened.spool.ordered()
        done = self._now()
        self.last_heldout = combine(opened.heldout)
        return {
            "round": opened.index,
            "attempt": opened.attempt,
            "outcome": outcome,
            "selected": opened.asked,
            "goal": opened.policy.goal,
            "quorum": opened.policy.quorum,
            "accepted": [
                {
                    "site": e.reply.site,
                    "weight": e.weight,
                    "norm": e.norm,
                    "crc": e.crc,
                    "late": e.late,
                    "of_round": e.reply.round,
                }
                for e in entries
            ],
            "rejected": opened.rejected,
            "missing": sorted(set(opened.asked) - opened.answered),
            "bytes_up": sum(e.num_bytes for e in entries),
            "bytes_down": opened.bytes_down,
            "seconds": {
                "dispatch": dispatch_seconds,
                "collect": collected - opened.began - dispatch_seconds,
                "aggregate": done - collected,
                "total": done - opened.began,
            },
            "state_crc": state_crc(self.state),
            "heldout": self.last_heldout,
        }

    def evaluate_sites(self) -> dict[str, Any] | None:
        """Score the current state on every available site's held-out rows; None when nobody answered."""
        began, c = self._now(), self.config.clients
        sites = self.registry.available(self.joining.online(), 10**9)
        base = state_crc(self.state)
        frame = compression.encode(self.state, self.layout, self.config.compression.down, base=base)
        record = ArrayRecord({"frame": frame_to_array(frame)})
        items: list[tuple[str, int, Any, Message]] = []
        for site in sites:
            order = self._instruction(site, self.round, 0, base, c.deadline_seconds)
            content = RecordDict({FRAME_RECORD: record, CONTROL_RECORD: to_record(order)})
            ttl = c.deadline_seconds + TTL_MARGIN_SECONDS
            message = Message(content, site.node, EVALUATE, ttl=ttl, group_id="evaluate")
            items.append((site.name, site.node, EVALUATE, message))
        waiting = {site.name for site in sites} - {f.parcel.site for f in self.mailbox.send(items)}
        found: dict[str, dict[str, float]] = {}
        while waiting and self._now() - began < c.deadline_seconds:
            for delivery in self.mailbox.poll(lambda parcel: parcel.tag == EVALUATE):
                waiting.discard(delivery.parcel.site)
                sums = self._read_evaluation(delivery, base)
                if sums:
                    found[delivery.parcel.site] = sums
            if waiting:
                self._sleep(self._poll)
        self.mailbox.forget(lambda parcel: parcel.tag == EVALUATE)
        return combine(found)

    def _read_evaluation(self, delivery: Delivery, base: str) -> dict[str, float] | None:
        if delivery.message is None:
            log.warning("evaluation at site %s: %s", delivery.parcel.site, delivery.failure)
            return None
        try:
            reply = from_record(Reply, control_of(delivery.message.content))
        except MessageError as error:
            log.warning("evaluation at site %s: %s", delivery.parcel.site, error)
            return None
        if reply.status != STATUS_OK:
            log.warning("evaluation at site %s: %s: %s", reply.site, reply.status, reply.reason)
        if reply.base != base or reply.site != delivery.parcel.site:
            return None
        return read_heldout(read_metrics(reply))


def frame_of(message: Message) -> bytes:
    """Return the one frame of an update; raises Rejected when there is none, several or another array."""
    records = message.content.array_records
    if list(records) != [FRAME_RECORD] or list(records[FRAME_RECORD]) != ["frame"]:
        raise Rejected(
            "layout", f"the update must hold one frame, it holds the records {sorted(records)[:3]}"
        )
    try:
        return array_to_frame(records[FRAME_RECORD]["frame"])
    except (ValueError, TypeError) as error:
        raise Rejected("layout", str(error)) from error


def rebase(
    arrays: Mapping[str, np.ndarray], old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return `new + (arrays - old)`: what a late site would hold had it started from the present state."""
    moved = {}
    for name, value in arrays.items():
        if value.dtype.kind in "iub":
            moved[name] = value
            continue
        change = value.astype(np.float64) - old[name].astype(np.float64)
        moved[name] = (new[name].astype(np.float64) + change).astype(value.dtype)
    return moved


def finite(array: np.ndarray) -> bool:
    """Return whether all numbers of an array are finite; integers always are."""
    return array.dtype.kind in "iub" or bool(np.isfinite(array.astype(np.float64)).all())
