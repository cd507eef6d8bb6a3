"""The round engine against a model of the round, driven by Hypothesis: any order of faults, one right outcome.

The model knows sites as (behaviour, delay), time in half seconds, and nothing of messages. What must agree after
every step: outcome, accepted sites, who is asked, the time it took, the state bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.scripted import Script, died, edited, make_bench, silent

from server_app.checker import accepted_once, bounded, in_order, validated, waits
from server_app.rounds import RunAborted

pytestmark = pytest.mark.fault

NAMES = ("a", "b", "c", "d")
TOKENS = {"a": 10, "b": 30, "c": 60, "d": 7}
STEPS = {"a": 1.0, "b": -2.5, "c": 0.3, "d": 4.0}
QUORUM, GRACE, DEADLINE, POLL, REACH = 2, 20.0, 100.0, 0.5, 2


@dataclass
class ModelSite:
    online: bool = True
    behaviour: str = "good"
    delay: float = 1.0
    strikes: list[int] = field(default_factory=list)
    quarantines: int = 0
    banned: int = 0
    silences: int = 0
    resting: int = 0


class Model:
    """About sixty lines of what a round is."""

    def __init__(self) -> None:
        self.sites = {name: ModelSite() for name in NAMES}
        self.round, self.value = 0, np.float32(0.0)
        # Answers that were not there when their round closed: (time due, round asked in, site).
        self.pending: list[tuple[float, int, str]] = []

    def available(self) -> list[str]:
        index = self.round + 1
        free = [n for n, s in self.sites.items() if s.online and s.banned <= index]
        awake = [n for n in free if self.sites[n].resting <= index]
        return awake if len(awake) >= QUORUM else free

    def attempt(self, now: float) -> tuple[str, list[str], float]:
        """Return (outcome, accepted, seconds) of the next attempt and take over what it changes."""
        index, asked = self.round + 1, self.available()
        due = {n: self.sites[n].delay for n in asked if self.sites[n].behaviour != "silent"}
        seconds, quorum_at = 0.0, None
        while True:
            here = [n for n in asked if n in due and due[n] <= seconds]
            accepted = [n for n in here if self.sites[n].behaviour == "good"]
            if quorum_at is None and len(accepted) >= QUORUM:
                quorum_at = seconds
            over = len(here) == len(asked) or len(accepted) >= len(asked) or seconds >= DEADLINE
            if over or (quorum_at is not None and seconds - quorum_at >= GRACE):
                break
            seconds += POLL
        end = now + seconds
        for name in here:
            self.sites[name].silences = self.sites[name].resting = 0
            if self.sites[name].behaviour == "bad":
                self.strike(name, index)
        for _due, _asked, name in [p for p in self.pending if p[0] <= end]:
            self.sites[name].silences = self.sites[name].resting = 0
        self.pending = [p for p in self.pending if p[0] > end]
        self.pending += [(now + due[n], index, n) for n in asked if n in due and n not in here]
        if len(accepted) < len(asked):
            for name in [n for n in asked if n not in here]:
                self.silence(name, index)
        if len(accepted) < QUORUM:
            return "skip", accepted, seconds
        total = np.float64(0.0)
        for name in accepted:
            total += TOKENS[name] * np.float64(np.float32(self.value + np.float32(STEPS[name])))
        self.value = np.float32(total / sum(TOKENS[n] for n in accepted))
        self.round = index
        self.pending = [p for p in self.pending if p[1] + REACH >= index + 1]
        return "commit", accepted, seconds

    def strike(self, name: str, index: int) -> None:
        site = self.sites[name]
        site.strikes = [r for r in [*site.strikes, index] if r > index - 10]
        if len(site.strikes) >= 3:
            site.quarantines += 1
            site.banned, site.strikes = index + 1 + 2**site.quarantines, site.strikes[-2:]

    def silence(self, name: str, index: int) -> None:
        site = self.sites[name]
        site.silences += 1
        if site.silences >= 2:
            site.resting = index + 1 + 2 ** (site.silences - 1)


FAULTS = {"bad": edited(weight=-1.0), "dead": died(), "silent": silent}


class RoundMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.model = Model()
        scripts = [Script(n, STEPS[n], tokens=TOKENS[n]) for n in NAMES]
        self.bench = make_bench(
            scripts,
            f"clients.quorum={QUORUM}",
            "run.max-consecutive-skips=1",
            "clients.max-norm-ratio=0",
            f"clients.late-rounds={REACH}",
        )
        self.nodes = {n: i for i, n in enumerate(NAMES, start=1)}

    @rule(
        name=st.sampled_from(NAMES),
        behaviour=st.sampled_from(["good", "bad", "dead", "silent"]),
        delay=st.sampled_from([0.0, 1.0, 7.5, 20.5, 30.0, 99.5, 100.0, 140.0, 300.0]),
    )
    def behave(self, name: str, behaviour: str, delay: float) -> None:
        site = self.model.sites[name]
        site.behaviour, site.delay = behaviour, delay
        script = self.bench.scripts[name]
        script.faults.clear()
        if behaviour != "good":
            script.faults.update(dict.fromkeys(range(1, 200), FAULTS[behaviour]))
        self.bench.grid.sites[self.nodes[name]].delay_seconds = delay

    @rule(name=st.sampled_from(NAMES), online=st.booleans())
    def connect(self, name: str, online: bool) -> None:
        self.model.sites[name].online = online
        self.bench.grid.sites[self.nodes[name]].online = online

    @rule(times=st.integers(1, 4))
    def rounds(self, times: int) -> None:
        for _ in range(times):
            if len(self.model.available()) >= QUORUM:
                self.one_round()

    def one_round(self) -> None:
        asked, began = self.model.available(), self.bench.clock.now()
        outcome, accepted, seconds = self.model.attempt(began)
        try:
            record = self.bench.engine.run_round()
            self.bench.events.append({"event": "round_committed", **record})
        except RunAborted:
            record = self.bench.of("round_committed")[-1]
        assert record["outcome"] == outcome
        assert record["selected"] == asked
        assert self.bench.clock.now() - began == seconds
        if outcome == "commit":
            assert [e["site"] for e in record["accepted"]] == accepted

    @invariant()
    def the_state_is_that_of_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        assert self.bench.engine.round == self.model.round
        assert self.bench.engine.state["b"].tolist() == [float(self.model.value)] * 3

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        events = [{"event": "run_started", "config": {"clients.late-rounds": REACH}}, *self.bench.events]
        standing = [e for e in events if e["event"] == "round_committed" and e["outcome"] == "commit"]
        for check in (accepted_once, validated, in_order, bounded):
            assert check(events, standing) == []
        assert waits(events, 0.5) == []


TestRounds = RoundMachine.TestCase
TestRounds.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
