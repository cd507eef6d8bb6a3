"""The round engine: every round is a transaction.

    OPEN(r)    choose sites, a function of (run seed, round, skips so far); one instruction and one frame each
    COLLECT    until the policy says so; each reply is validated before it is kept, a bad one is dropped and named
    COMMIT     one new state from the accepted updates, in canonical order of site names
    SKIP       below the quorum: the state stays bit for bit; the round keeps its number and gets a new attempt
    ABORT      after `run.max-consecutive-skips` of them, with a sentence that says why

It owns its loop on `push_messages` / `pull_messages`, because Flower's own wait is not a deadline. Time and sleep
are arguments, so that hundreds of rounds run in a second of a test. Sending is `server_app.dispatch`, collecting
`server_app.collect`. What it does not do: it knows no model and no task; evaluation data stay at the sites.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from server_app import streamed
from server_app.collect import Collector
from server_app.context import Context, Standing
from server_app.dispatch import Dispatcher
from server_app.downlink import broadcast_of
from server_app.follow_up import FollowUps
from server_app.heldout import combine
from server_app.joining import Joining
from server_app.leases import LeaseTable, settle
from server_app.mailbox import Mailbox, Parcel
from server_app.opened import Ask, OpenRound
from server_app.operator import Operator
from server_app.policy import RoundPolicy, Verdict, adaptive_deadline, num_asked
from server_app.privacy import Privacy
from server_app.scoring import evaluate_sites
from server_app.signed import signed_fields
from server_app.sites import Registry, Site
from server_app.spool import Entry
from server_app.utilisation import utilisation
from server_app.validate import NORM_WINDOW, decode_update
from strategies import Outcome, SiteUpdate, UmbelStrategy
from strategies.aggregation.dtypes import all_finite
from strategies.outer.gauges import Gauges
from strategies.robust_merge import RobustMerge
from umbel.config import Config
from umbel.digest import state_crc
from umbel.errors import EXIT_UNAVAILABLE, UmbelError
from umbel.exchange import Exchange
from umbel.seeds import generator

log = logging.getLogger("umbel.server")


# Verdicts on what an update holds, as against reasons why none came.
VALIDATION_KINDS = ("header", "weight", "non_finite", "frame", "layout", "norm")


class RunAborted(UmbelError):
    """Too many rounds in a row brought no commit; the text says what every site answered."""


class SitesGone(RunAborted):
    """Too few sites are online for a quorum, and none came within the bound."""

    exit_code = EXIT_UNAVAILABLE


class Engine:
    """Runs rounds over a strategy; the global state is `self.state`, replaced whole at each commit."""

    def __init__(
        self,
        config: Config,
        strategy: UmbelStrategy,
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
        follow_up: bool = False,
        keep_update: Callable[[int, int, str, float, bytes], None] | None = None,
        operator: Operator | None = None,
        split: Any = None,
    ) -> None:
        self.ctx = Context(
            config,
            strategy,
            mailbox,
            joining,
            run,
            on_event,
            operator or Operator(None, on_event),
            Standing(state),
            now,
            sleep,
            poll_seconds,
            fault,
            split=split,
            broadcast=broadcast_of(config, strategy, state),
            leases=LeaseTable() if config.data.leases == "server" else None,
        )
        self._dispatcher = Dispatcher(self.ctx, before_send=before_send)
        self._follow_ups = FollowUps(self.ctx, enabled=follow_up)
        self._collector = Collector(self.ctx, send_on=self._dispatcher.send_on)
        # Called with (round, attempt, key, weight, frame) of every update a commit uses, in canonical order.
        self._keep_update = keep_update
        self._robust = RobustMerge(config, strategy) if config.clients.merge != "mean" else None
        self.privacy = Privacy(config, strategy, on_event) if config.privacy.clip_norm > 0 else None
        self.last_heldout: dict[str, Any] | None = None

    @property
    def registry(self) -> Registry:
        """The sites of this run."""
        return self.ctx.registry

    @property
    def strategy(self) -> UmbelStrategy:
        """The method."""
        return self.ctx.strategy

    @property
    def standing(self) -> Standing:
        """What a checkpoint must hold of the engine."""
        return self.ctx.standing

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The global state of the last commit."""
        return self.ctx.standing.state

    @property
    def round(self) -> int:
        """The number of committed rounds."""
        return self.ctx.standing.round

    def run_round(self) -> dict[str, Any]:
        """Commit the next round and return its record; skips are retried up to the limit.

        Raises RunAborted with every site's reason when the limit is reached.
        """
        skips: list[str] = []
        limit = self.ctx.config.run.max_consecutive_skips
        while True:
            record = self._attempt(len(skips))
            if record["outcome"] == "commit":
                return record
            skips.append(record["why"])
            if len(skips) >= limit:
                raise RunAborted(
                    f"round {self.ctx.standing.round + 1} brought no commit in {limit} attempts. Last: {skips[-1]}. "
                    "The last good state is kept; mend the sites and resume with --set run.resume=auto."
                )

    def _attempt(self, skips: int) -> dict[str, Any]:
        standing = self.ctx.standing
        index = standing.round + 1
        if self.privacy is not None:
            self.privacy.check(index)
        attempt = standing.attempts[index] = standing.attempts.get(index, 0) + 1
        for name in sorted(self.ctx.operator.read()):
            self.registry.pardon(name)
        chosen = self._choose(index, skips)
        goal = self._goal(len(chosen))
        policy = RoundPolicy(
            goal, self._quorum(goal), self._deadline(), self.ctx.config.clients.grace_seconds
        )
        self.ctx.event(
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
        opened = OpenRound(index, attempt, policy, [s.name for s in chosen], self.ctx.now())
        try:
            for delivery in self._dispatcher.send(opened, chosen):
                self._collector.fail(opened, delivery)
            self._follow_ups.send(index, (site for site in chosen if site.name not in opened.answered))
            dispatch_seconds = self.ctx.now() - opened.began
            self.ctx.fault("dispatch", index)
            verdict = self._collector.collect(opened)
            collected = self.ctx.now()
            if verdict is Verdict.COMMIT:
                self.ctx.fault("before_commit", index)
                return self._commit(opened, dispatch_seconds, collected)
            return self._skip(opened, dispatch_seconds, collected)
        finally:
            opened.spool.close()
            if self.ctx.split is not None:
                self.ctx.split.end()

    def _choose(self, index: int, skips: int) -> list[Site]:
        """Return the sites asked in this round, by name; waits, within the start timeout, for at least a quorum."""
        c = self.ctx.config.clients
        began = self.ctx.now()
        while True:
            online = self.ctx.joining.online()
            self.ctx.joining.ask_new(online, c.start_timeout_seconds)
            self.ctx.joining.collect()
            available = self.registry.available(online, index, self.ctx.operator.orders)
            if len(available) < max(1, self._quorum(self._goal(len(available)))):
                # Rather ask a silent site than nobody.
                available = self.registry.available(online, index, self.ctx.operator.orders, wake=True)
            goal = self._goal(len(available))
            if len(available) >= max(1, self._quorum(goal)):
                break
            if self.ctx.now() - began >= c.start_timeout_seconds:
                raise SitesGone(
                    f"round {index}: only {len(available)} of the {max(1, self._quorum(goal))} sites that a quorum "
                    f"needs are online after {c.start_timeout_seconds:g} s. "
                    f"{self.ctx.joining.reasons()} The last good state is kept."
                )
            self.ctx.sleep(self.ctx.poll_seconds)
        num = num_asked(goal, c.over_provision, len(available))
        if num >= len(available):
            return available
        order = generator(self.ctx.config.run.seed, "sites", index, skips).permutation(len(available))
        # Pinned sites come first, in the order drawn; sort is stable.
        drawn = sorted(
            (available[i] for i in order), key=lambda site: site.name not in self.ctx.operator.orders.pin
        )
        return sorted(drawn[:num], key=lambda site: site.name)

    def _goal(self, available: int) -> int:
        wanted = self.ctx.config.clients.goal
        return min(wanted, available) if wanted else available

    def _quorum(self, goal: int) -> int:
        """Return the quorum; the default is half, rounded up, of the goal and of the sites the run started with.

        The second half matters when sites vanish: three sites must not silently become one.
        """
        c = self.ctx.config.clients
        return c.quorum or max(1, -(-goal // 2), -(-(c.goal or c.minimum) // 2))

    def _deadline(self) -> float:
        c = self.ctx.config.clients
        if not c.adaptive_deadline:
            return c.deadline_seconds
        return adaptive_deadline(self.ctx.standing.arrivals, c.min_deadline_seconds, c.deadline_seconds)

    def _commit(self, opened: OpenRound, dispatch_seconds: float, collected: float) -> dict[str, Any]:
        entries = opened.spool.ordered()
        weights = [e.weight for e in entries]
        expected_weight = statistics.fmean(weights) * len(opened.asked)
        updates: Iterable[SiteUpdate] = (
            SiteUpdate(e.reply.site, e.weight, arrays, e.reply.tokens, e.reply.steps)
            for e, arrays in opened.spool.decoded(self._decoded)
        )
        gauges = self._gauges(entries)
        updates = gauges.watch(updates) if gauges else updates
        aggregate, link, published = self._merge(opened), self.ctx.broadcast, {}
        lean = streamed.can_merge(self.ctx, opened, entries)
        memory = {} if lean else self.ctx.strategy.state_dict()
        remembered = {name: np.array(value) for name, value in memory.items()}
        bad = None
        try:
            if lean:
                gauges, outcome = None, streamed.merge(self.ctx, opened, entries)
            else:
                outcome = aggregate(self.ctx.standing.state, updates, expected_weight=expected_weight)
                bad = next(
                    (f"{n} is not finite" for n, a in outcome.state.items() if not all_finite(a)), None
                )
            if link is not None and bad is None:
                published = {"downlink": link.publish(outcome.state, opened.index)}
        except (UmbelError, ValueError, ArithmeticError, np.linalg.LinAlgError) as error:
            # Validated updates can still meet in a way that a method cannot digest; that costs the round, not the run.
            outcome, bad = None, f"{type(error).__name__}: {error}"
            if lean:
                # The method's memory is part of the way into the next round: only a checkpoint has the last one.
                raise RunAborted(
                    f"round {opened.index}: the merge failed: {bad}. Resume from the checkpoint."
                ) from error
        if outcome is None or bad is not None:
            # Nothing of a failed merge stays, the method's own memory included.
            self.ctx.strategy.load_state_dict(remembered)
            opened.rejected.append({"site": "*", "kind": "aggregate", "reason": f"the aggregate: {bad}"})
            return self._skip(opened, dispatch_seconds, collected)
        if self._keep_update is not None:
            for key in sorted(opened.spool.entries):
                entry = opened.spool.entries[key]
                self._keep_update(opened.index, opened.attempt, key, entry.weight, opened.spool.frame(entry))
        standing = self.ctx.standing
        standing.state, standing.round = outcome.state, opened.index
        standing.norms = [*standing.norms, *(e.norm for e in entries if not e.late)][-NORM_WINDOW:]
        standing.arrivals = standing.arrivals[-NORM_WINDOW:]
        for entry in entries:
            if not entry.late:
                self.registry.sites[entry.reply.site].settled = (opened.index, opened.attempt)
        self._note_outcomes(opened, committed=True)
        self.ctx.fault("after_commit", opened.index)
        tokens = sum(e.reply.tokens for e in entries)
        record = self._record(opened, "commit", dispatch_seconds, collected)
        record["train_loss"] = sum(e.reply.loss * e.reply.tokens for e in entries) / tokens
        record["tokens"] = tokens
        if self.ctx.leases is not None:
            record["leases"] = self.ctx.leases.summary()
        record.update(outcome.metrics, **published)
        if gauges:
            record["gauges"] = gauges.report(outcome.state)
        if self.privacy is None:
            record["utilisation"] = utilisation(entries, record["seconds"]["total"])
        self.ctx.mailbox.forget(self._is_stale)
        self._follow_ups.clear(opened.index)
        record["in_flight"] = sum(isinstance(p.tag, Ask) for p in self.ctx.mailbox.in_flight)
        return record

    def _merge(self, opened: OpenRound) -> Callable[..., Outcome]:
        """Return what makes one state of this round's updates: the method, or what replaces its mean."""
        if self.privacy is not None:
            return self.privacy.merge(opened.index, opened.attempt)
        return self._robust.aggregate if self._robust else self.ctx.strategy.aggregate

    def _gauges(self, entries: list[Entry]) -> Gauges | None:
        """Return the gauges of this round; none where sites send other tensors than the state's, or in private."""
        plain = all(e.order.exchange == Exchange() for e in entries)
        return Gauges(self.ctx.standing.state) if plain and self.privacy is None else None

    def _decoded(self, frame: bytes, entry: Entry) -> dict[str, np.ndarray]:
        order, up = entry.order, self.ctx.config.compression.up
        values = decode_update(frame, order.up_layout, up, order.known)
        link = self.ctx.broadcast
        return values if link is None else link.onto(values, self.ctx.standing.state)

    def _note_outcomes(self, opened: OpenRound, *, committed: bool) -> None:
        """Remember for each asked site what became of its update; its next instruction says so.

        A refused update must not come back, a lost one must: what error feedback at the site needs to know.
        """
        if self.ctx.leases is not None:
            settle(self.ctx.leases, opened, self.ctx.config.train, committed=committed)
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
        late_rounds = self.ctx.config.clients.late_rounds
        return isinstance(ask, Ask) and ask.expected.round + late_rounds < self.round + 1

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
        self.ctx.event("round_committed", fsync=True, **record)
        log.warning("round %d, attempt %d: skipped: %s", opened.index, opened.attempt, record["why"])
        return record

    def _record(
        self, opened: OpenRound, outcome: str, dispatch_seconds: float, collected: float
    ) -> dict[str, Any]:
        entries = opened.spool.ordered()
        done = self.ctx.now()
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
                    "bytes": e.num_bytes,
                    **signed_fields(e.reply),
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
            "state_crc": state_crc(self.ctx.standing.state),
            "heldout": self.last_heldout,
            **({"split": self.ctx.split.record()} if self.ctx.split is not None else {}),
        }

    def _note_silence(self, missing: list[str], index: int) -> None:
        for name in missing:
            until = self.registry.silent(name, index)
            if until:
                self.ctx.event("site_silent", round=index, site=name, resting_until=until)
                log.error(
                    "site %s is online and said nothing for %d rounds: is its flower-superexec alive? "
                    "It is asked again in round %d",
                    name,
                    self.registry.sites[name].silences,
                    until,
                )

    def evaluate_sites(self) -> dict[str, Any] | None:
        """Score the current state on every available site's held-out rows; None when nobody answered."""
        return evaluate_sites(self.ctx, self._dispatcher)
