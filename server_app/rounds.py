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
from compression.payload import is_exact
from server_app.heldout import combine
from server_app.joining import Joining
from server_app.mailbox import Delivery, Mailbox, Parcel
from server_app.operator import Operator
from server_app.policy import RoundPolicy, Verdict, adaptive_deadline, num_asked
from server_app.sites import Registry, Site
from server_app.spool import Entry, Spool
from server_app.timeouts import TRAVEL_SECONDS, TTL_MARGIN_SECONDS
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
from strategies import Order, Seat, SiteUpdate, UmbelStrategy
from strategies.aggregation.dtypes import all_finite
from strategies.robust_merge import RobustMerge
from umbel.config import Config, to_json
from umbel.digest import state_crc
from umbel.errors import EXIT_UNAVAILABLE, ConfigError, UmbelError
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


# Verdicts on what an update holds, as against reasons why none came.
VALIDATION_KINDS = ("header", "weight", "non_finite", "frame", "layout", "norm")


class RunAborted(UmbelError):
    """Too many rounds in a row brought no commit; the text says what every site answered."""


class SitesGone(RunAborted):
    """Too few sites are online for a quorum, and none came within the bound."""

    exit_code = EXIT_UNAVAILABLE


@dataclass
class Ask:
    """What one train message in flight was sent for. `expected` is compared with the reply's header."""

    expected: Expected
    # What the site started from; kept only where a late update may be re-based on it.
    order: Order | None


@dataclass(frozen=True)
class Outgoing:
    """One frame and what it is; sites with the same order share it."""

    order: Order
    base: str
    frame: bytes
    record: ArrayRecord


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
    quorum_at: float | None = None
    bytes_down: int = 0
    sent: dict[str, Outgoing] = field(default_factory=dict)

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
        fault: Callable[[str, int], Any] = lambda point, round_index: None,
        before_send: Callable[[], None] = lambda: None,
        keep_update: Callable[[int, int, str, float, bytes], None] | None = None,
        operator: Operator | None = None,
    ) -> None:
        self.config, self.strategy, self.layout, self.state = config, strategy, layout, state
        self.mailbox, self.joining, self.run, self._event = mailbox, joining, run, on_event
        self._now, self._sleep, self._poll, self._fault = now, sleep, poll_seconds, fault
        # Called when the messages of a round are ready and none is sent: the last moment to make the round before
        # durable, because these messages tell the sites that it counts.
        self._before_send = before_send
        # Called with (round, attempt, key, weight, frame) of every update a commit uses, in canonical order.
        self._keep_update = keep_update
        self._operator = operator or Operator(None, on_event)
        self._robust = RobustMerge(config, strategy) if config.clients.merge != "mean" else None
        self.round = 0
        # The last attempt of a round that was opened, by an earlier life of this server too: never used again.
        self.attempts: dict[int, int] = {}
        self.norms: list[float] = []
        # Sites that failed or refused since their last accepted update: they are sent everything.
        self._doubtful: set[str] = set()
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
        attempt = self.attempts[index] = self.attempts.get(index, 0) + 1
        for name in sorted(self._operator.read()):
            self.registry.pardon(name)
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
            self._fault("dispatch", index)
            verdict = self._collect(opened)
            collected = self._now()
            if verdict is Verdict.COMMIT:
                self._fault("before_commit", index)
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
            available = self.registry.available(online, index, self._operator.orders)
            if len(available) < max(1, self._quorum(self._goal(len(available)))):
                # Rather ask a silent site than nobody.
                available = self.registry.available(online, index, self._operator.orders, wake=True)
            goal = self._goal(len(available))
            if len(available) >= max(1, self._quorum(goal)):
                break
            if self._now() - began >= c.start_timeout_seconds:
                raise SitesGone(
                    f"round {index}: only {len(available)} of the {max(1, self._quorum(goal))} sites that a quorum "
                    f"needs are online after {c.start_timeout_seconds:g} s. "
                    f"{self.joining.reasons()} The last good state is kept."
                )
            self._sleep(self._poll)
        num = num_asked(goal, c.over_provision, len(available))
        if num >= len(available):
            return available
        order = generator(self.config.run.seed, "sites", index, skips).permutation(len(available))
        # Pinned sites come first, in the order drawn; sort is stable.
        drawn = sorted(
            (available[i] for i in order), key=lambda site: site.name not in self._operator.orders.pin
        )
        return sorted(drawn[:num], key=lambda site: site.name)

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
        self, site: Site, index: int, attempt: int, out: Outgoing, seconds: float, **extra: Any
    ) -> Instruction:
        return Instruction(
            run=self.run,
            round=index,
            attempt=attempt,
            base=out.base,
            site=site.name,
            remaining_seconds=max(1.0, seconds - TRAVEL_SECONDS),
            up=self.config.compression.up,
            config=self._site_config,
            settled=json.dumps(list(site.settled)),
            layout=out.order.down_layout.digest(),
            **extra,
        )

    def _still_has(self, site: Site) -> bool:
        """Tell whether a site has what the last committed round froze: it took part and did not fail since."""
        return 0 < self.round == site.settled[0] and site.name not in self._doubtful

    def _outgoing(self, sites: list[Site], index: int, *, training: bool) -> dict[str, Outgoing]:
        """Return what each site is sent. A frame is encoded once for all sites that share an order."""
        seats = [
            Seat(s.name, position, len(sites), asked_rank(s.facts), training and self._still_has(s))
            for position, s in enumerate(sites)
        ]
        orders = self.strategy.orders(self.state, seats, self.round, training=training)
        made: dict[int, Outgoing] = {}
        for order in orders.values():
            if id(order) not in made:
                self._check_lossy(order)
                base, down = state_crc(order.down), self.config.compression.down
                frame = compression.encode(order.down, order.down_layout, down, round_index=index, base=base)
                record = ArrayRecord({"frame": frame_to_array(frame)})
                made[id(order)] = Outgoing(order, base, frame, record)
        return {name: made[id(order)] for name, order in orders.items()}

    def _check_lossy(self, order: Order) -> None:
        """Refuse a lossy codec where a site sends tensors that it was not sent: there is no change to encode."""
        unknown = [e.name for e in order.up_layout.entries if e.name not in order.known]
        if unknown and not is_exact(self.config.compression.up):
            raise ConfigError(
                "compression.up",
                f"cannot be lossy with run.method = {self.config.run.method!r}: its updates are no changes of what was "
                f"sent ({unknown[0]} and {len(unknown) - 1} more)",
                got=self.config.compression.up,
                allowed="'exact' or 'lossless'",
            )

    def _dispatch(self, opened: OpenRound, chosen: list[Site]) -> float:
        began = self._now()
        opened.sent = self._outgoing(chosen, opened.index, training=True)
        directives = self.strategy.directives(self.round)
        directives["codec_seed"] = derive_seed(self.config.run.seed, "codec", opened.index)
        directives["feedback"] = self.config.compression.feedback
        every = self.config.eval.every
        evaluate = opened.index == 1 or (every > 0 and (opened.index - 1) % every == 0)
        seconds = opened.policy.deadline_seconds
        items: list[tuple[str, int, Any, Message]] = []
        late = self.config.clients.late == "weight"
        for site in chosen:
            out = opened.sent[site.name]
            order = self._instruction(
                site,
                opened.index,
                opened.attempt,
                out,
                seconds,
                evaluate=evaluate,
                directives=json.dumps({**directives, **exchange_of(out)}, sort_keys=True),
                outcomes=json.dumps(site.outcomes),
            )
            content = RecordDict({FRAME_RECORD: out.record, CONTROL_RECORD: to_record(order)})
            message = Message(
                content, site.node, TRAIN, ttl=seconds + TTL_MARGIN_SECONDS, group_id=str(opened.index)
            )
            expected = Expected(self.run, opened.index, opened.attempt, out.base, site.name)
            items.append((site.name, site.node, Ask(expected, out.order if late else None), message))
            opened.bytes_down += len(out.frame)
        self._before_send()
        failed = self.mailbox.send(items)
        lost = {f.parcel.site for f in failed}
        for site in chosen:
            if site.name not in lost:
                size = len(opened.sent[site.name].frame)
                self._event("dispatched", round=opened.index, site=site.name, bytes=size)
        for delivery in failed:
            opened.bytes_down -= len(opened.sent[delivery.parcel.site].frame)
            self._fail(opened, delivery)
        return self._now() - began

    def _collect(self, opened: OpenRound) -> Verdict:
        first = True
        while True:
            for delivery in self.mailbox.poll(lambda parcel: isinstance(parcel.tag, Ask)):
                self._take(opened, delivery)
                # The reply must not live on in this variable while the next one is taken over.
                del delivery
                if first and opened.spool.entries:
                    self._fault("first_reply", opened.index)
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
        self.registry.heard(delivery.parcel.site)
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
                self._accept(opened, reply, delivery.message, opened.sent[site].order)
        except MessageError as error:
            self._reject(opened, site, Rejected("header", str(error)), is_late, ask.expected.round)
        except Rejected as rejected:
            self._reject(opened, site, rejected, is_late, ask.expected.round)

    def _accept(self, opened: OpenRound, reply: Reply, message: Message, order: Order) -> None:
        site = self.registry.sites[reply.site]
        metrics = read_metrics(reply)
        sums = read_heldout(metrics)
        if sums:
            opened.heldout[reply.site] = sums
        weight = check_weight(reply, self._max_weight(site))
        if self.config.clients.weighting == "uniform":
            weight = 1.0
        frame = frame_of(message)
        arrays = decode_update(frame, order.up_layout, self.config.compression.up, order.known)
        norm = update_norm(*self.strategy.measured(arrays, order))
        check_norm(norm, self.norms, self.config.clients.max_norm_ratio)
        entry = Entry(reply, weight, norm, len(frame), state_crc(arrays), order=order)
        opened.spool.add(reply.site, entry, frame)
        self._doubtful.discard(reply.site)
        self.arrivals.append(self._now() - opened.began)
        self._event(
            "update_accepted",
            round=opened.index,
            attempt=opened.attempt,
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
            residual_ratio=metrics.get("residual_ratio"),
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
        if c.late != "weight" or age > c.late_rounds or age < 1 or ask.order is None:
            raise Rejected("late", f"arrived {age} rounds after its own", strike=False)
        layout = ask.order.up_layout
        arrays = decode_update(frame_of(message), layout, self.config.compression.up, ask.order.known)
        norm = update_norm(*self.strategy.measured(arrays, ask.order))
        check_norm(norm, self.norms, c.max_norm_ratio)
        weight = check_weight(reply, None) if c.weighting == "tokens" else 1.0
        weight *= (1.0 + age) ** -c.staleness_exponent
        moved = rebase(arrays, ask.order.known, self.state)
        crc = state_crc(moved)
        frame = compression.encode(moved, layout, "exact", round_index=opened.index)
        key = f"{reply.site}\x00late-{ask.expected.round:06d}"
        opened.spool.add(key, Entry(reply, weight, norm, len(frame), crc, late=True, order=ask.order), frame)
        self._event(
            "update_accepted",
            round=opened.index,
            attempt=opened.attempt,
            site=reply.site,
            weight=weight,
            norm=norm,
            crc=crc,
            tokens=reply.tokens,
            steps=reply.steps,
            loss=reply.loss,
            bytes=len(frame),
            partial=reply.partial,
            late=True,
            of_round=ask.expected.round,
        )

    def _reject(self, opened: OpenRound, site: str, rejected: Rejected, is_late: bool, of_round: int) -> None:
        self._doubtful.add(site)
        if not is_late:
            opened.answered.add(site)
            opened.rejected.append({"site": site, "kind": rejected.kind, "reason": rejected.reason})
        until = 0
        if rejected.strike and not is_late:
            until = self.registry.strike(site, opened.index)
        self._event(
            "update_rejected",
            round=of_round,
            attempt=None if is_late else opened.attempt,
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
        self._doubtful.add(site)
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
            for e, arrays in opened.spool.decoded(self._decoded)
        )
        aggregate = self._robust.aggregate if self._robust else self.strategy.aggregate
        remembered = {name: np.array(value) for name, value in self.strategy.state_dict().items()}
        try:
            outcome = aggregate(self.state, updates, expected_weight=expected_weight)
            bad = next((f"{n} is not finite" for n, a in outcome.state.items() if not all_finite(a)), None)
        except (UmbelError, ValueError, ArithmeticError, np.linalg.LinAlgError) as error:
            # Validated updates can still meet in a way that a method cannot digest; that costs the round, not the run.
            outcome, bad = None, f"{type(error).__name__}: {error}"
        if outcome is None or bad is not None:
            # Nothing of a failed merge stays, the method's own memory included.
            self.strategy.load_state_dict(remembered)
            opened.rejected.append({"site": "*", "kind": "aggregate", "reason": f"the aggregate: {bad}"})
            return self._skip(opened, dispatch_seconds, collected)
        if self._keep_update is not None:
            for key in sorted(opened.spool.entries):
                entry = opened.spool.entries[key]
                self._keep_update(opened.index, opened.attempt, key, entry.weight, opened.spool.frame(entry))
        self.state = outcome.state
        self.round = opened.index
        self.norms = [*self.norms, *(e.norm for e in entries if not e.late)][-NORM_WINDOW:]
        self.arrivals = self.arrivals[-NORM_WINDOW:]
        for entry in entries:
            if not entry.late:
                self.registry.sites[entry.reply.site].settled = (opened.index, opened.attempt)
        self._note_outcomes(opened, committed=True)
        self._fault("after_commit", opened.index)
        tokens = sum(e.reply.tokens for e in entries)
        record = self._record(opened, "commit", dispatch_seconds, collected)
        record["train_loss"] = sum(e.reply.loss * e.reply.tokens for e in entries) / tokens
        record["tokens"] = tokens
        record.update(outcome.metrics)
        self.mailbox.forget(self._is_stale)
        record["in_flight"] = len(self.mailbox.in_flight)
        return record

    def _decoded(self, frame: bytes, entry: Entry) -> dict[str, np.ndarray]:
        return decode_update(frame, entry.order.up_layout, self.config.compression.up, entry.order.known)

    def _note_outcomes(self, opened: OpenRound, *, committed: bool) -> None:
        """Remember for each asked site what became of its update; its next instruction says so.

        A refused update must not come back, a lost one must: what error feedback at the site needs to know.
        """
        kept = {e.reply.site for e in opened.spool.ordered() if not e.late}
        bad = {r["site"] for r in opened.rejected if r["kind"] in VALIDATION_KINDS}
        for name in opened.asked:
            if name in kept and committed:
                outcome = "applied"
            else:
                outcome = "rejected" if name in bad else "dropped"
            self.registry.sites[name].note(opened.index, opened.attempt, outcome)

    def _is_stale(self, parcel: Parcel) -> bool:
        """Tell whether nobody would use the reply to this parcel any more."""
        ask = parcel.tag
        return isinstance(ask, Ask) and ask.expected.round + self.config.clients.late_rounds < self.round + 1

    def _skip(self, opened: OpenRound, dispatch_seconds: float, collected: float) -> dict[str, Any]:
        record = self._record(opened, "skip", dispatch_seconds, collected)
        self._note_outcomes(opened, committed=False)
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
        missing = sorted(set(opened.asked) - opened.answered)
        if opened.accepted < opened.policy.goal:
            # With the goal reached nobody waited for them, so that their silence says nothing.
            self._note_silence(missing, opened.index)
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
                    "tokens": e.reply.tokens,
                    "steps": e.reply.steps,
                }
                for e in entries
            ],
            "rejected": opened.rejected,
            "missing": missing,
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

    def _note_silence(self, missing: list[str], index: int) -> None:
        for name in missing:
            until = self.registry.silent(name, index)
            if until:
                self._event("site_silent", round=index, site=name, resting_until=until)
                log.error(
                    "site %s is online and said nothing for %d rounds: is its flower-superexec alive? "
                    "It is asked again in round %d",
                    name,
                    self.registry.sites[name].silences,
                    until,
                )

    def evaluate_sites(self) -> dict[str, Any] | None:
        """Score the current state on every available site's held-out rows; None when nobody answered."""
        began, c = self._now(), self.config.clients
        sites = self.registry.available(self.joining.online(), 10**9, self._operator.orders)
        sent = self._outgoing(sites, 0, training=False)
        items: list[tuple[str, int, Any, Message]] = []
        for site in sites:
            out = sent[site.name]
            directives = json.dumps(exchange_of(out), sort_keys=True)
            order = self._instruction(site, self.round, 0, out, c.deadline_seconds, directives=directives)
            content = RecordDict({FRAME_RECORD: out.record, CONTROL_RECORD: to_record(order)})
            ttl = c.deadline_seconds + TTL_MARGIN_SECONDS
            message = Message(content, site.node, EVALUATE, ttl=ttl, group_id="evaluate")
            items.append((site.name, site.node, EVALUATE, message))
        waiting = {site.name for site in sites} - {f.parcel.site for f in self.mailbox.send(items)}
        found: dict[str, dict[str, float]] = {}
        while waiting and self._now() - began < c.deadline_seconds:
            for delivery in self.mailbox.poll(lambda parcel: parcel.tag == EVALUATE):
                waiting.discard(delivery.parcel.site)
                sums = self._read_evaluation(delivery, sent[delivery.parcel.site].base)
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
    finally:
        # Flower's records refer to themselves: a message lives until some later garbage collection, its bytes need not.
        records[FRAME_RECORD].clear()


def asked_rank(facts: Mapping[str, Any]) -> int:
    """Return the adapter rank a site asked for when it joined; 0 for none or nonsense."""
    rank = facts.get("rank")
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 < rank <= 4096 else 0


def exchange_of(out: Outgoing) -> dict[str, Any]:
    """Return the directive that tells a site what it exchanges; nothing for the plain adapter or model."""
    return {"exchange": found} if (found := out.order.exchange.to_dict()) else {}


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
