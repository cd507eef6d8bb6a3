from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.telemetry.console import footer, header, last_round_line
from umbel.telemetry.history import History
from umbel.telemetry.metrics import metric_rows
from umbel.telemetry.report import render_report
from umbel.telemetry.summary import summarise


def start(**more):
    return {"t": 1.0, "event": "run_started", "rounds": 4} | more


def opened(index, sites=("a", "b"), attempt=1):
    return {"event": "round_opened", "round": index, "attempt": attempt, "selected": list(sites)}


def update(index, site, tokens=10, **more):
    return {"event": "update_accepted", "round": index, "site": site, "tokens": tokens, "bytes": 5} | more


def closed(index, sites=("a", "b"), outcome="commit", attempt=1, **more):
    entries = [{"site": s, "late": False} for s in sites]
    return {
        "event": "round_committed",
        "round": index,
        "attempt": attempt,
        "outcome": outcome,
        "accepted": entries,
    } | more


def test_contributions_count_committed_rounds_only(two_site_run):
    history = History.from_events(two_site_run)
    assert history.contributions() == {"north": (2, 500), "south": (1, 100)}
    assert history.tokens() == 600
    assert [row.outcome for row in history.rounds] == ["commit", "skip", "commit"]
    assert [row.tokens() for row in history.rounds] == [400, 0, 200]


def test_bytes_count_every_round(two_site_run):
    history = History.from_events(two_site_run)
    assert (history.bytes_up(), history.bytes_down()) == (4000, 12000)
    assert history.sites["north"].bytes_up == 3000
    assert history.sites["south"].bytes_down == 2000


def test_heldout_of_a_round_belongs_to_the_state_it_started_from(two_site_run):
    history = History.from_events(two_site_run)
    assert history.heldout_curve() == [(0, 4.0), (1, 3.0), (2, 3.0), (3, 2.0)]
    assert history.heldout_curve("server") == [(3, 2.2)]
    assert history.heldout_band() == [(0, 3.0, 5.0), (1, 2.5, 3.5), (2, 2.5, 3.5)]
    assert history.first_last_heldout() == (4.0, 2.0)
    assert history.first_last_heldout("south") == (5.0, 3.5)
    assert history.first_last_heldout("west") == (None, None)
    assert history.train_curve() == [(1, 4.5), (3, 3.0)]


def test_an_evaluation_is_preferred_to_the_incoming_one_in_either_order():
    evaluated = {"event": "evaluated", "round": 0, "where": "sites", "loss": 7.0}
    record = closed(1, heldout={"loss": 8.0})
    for events in ([evaluated, record], [record, evaluated]):
        assert History.from_events([start(), opened(1), *events]).heldout_curve() == [(0, 7.0)]


def test_participation_has_one_word_for_every_fate(two_site_run):
    rounds = History.from_events(two_site_run).rounds
    assert [row.participation("north") for row in rounds] == ["accepted", "unused", "accepted"]
    assert [row.participation("south") for row in rounds] == ["accepted", "missing", "failed"]
    assert rounds[2].why("south") == "out of memory"
    assert rounds[0].participation("west") == "idle"
    row = History.from_events([start(), opened(1), update(1, "a")]).rounds[0]
    assert (row.participation("a"), row.participation("b")) == ("accepted", "waiting")


def test_a_late_update_counts_in_the_round_that_took_it():
    late = [{"site": "a", "late": False}, {"site": "b", "late": True}]
    history = History.from_events(
        [
            start(),
            opened(1),
            update(1, "a"),
            closed(1, ["a"], missing=["b"]),
            opened(2, ["a"]),
            update(1, "b", 33, late=True),
            update(2, "a"),
            closed(2, [], accepted=late),
        ]
    )
    assert [row.participation("b") for row in history.rounds] == ["missing", "late"]
    assert history.rounds[1].num_late == 1
    assert history.contributions() == {"a": (2, 20), "b": (1, 33)}


def test_a_killed_round_and_its_second_attempt_are_two_rows():
    history = History.from_events(
        [
            start(),
            opened(1),
            update(1, "a", 10),
            start(),
            opened(1, attempt=2),
            update(1, "a", 10),
            closed(1, ["a"], attempt=2),
        ]
    )
    assert [(r.round, r.attempt, r.outcome) for r in history.rounds] == [
        (1, 1, "interrupted"),
        (1, 2, "commit"),
    ]
    assert [r.participation("b") for r in history.rounds] == ["unused", "missing"]
    assert history.contributions() == {"a": (1, 10)}
    assert (history.num_starts, history.bytes_up()) == (2, 10)


def test_a_resume_from_an_older_checkpoint_undoes_what_came_after():
    first = [
        start(),
        opened(1),
        update(1, "a"),
        closed(1),
        opened(2),
        update(2, "a"),
        closed(2, train_loss=9.0),
    ]
    evaluated = {"event": "evaluated", "round": 2, "where": "sites", "loss": 5.0}
    history = History.from_events([*first, evaluated, start(resumed_from=1)])
    assert [row.outcome for row in history.rounds] == ["commit", "undone"]
    assert (history.train_curve(), history.heldout_curve()) == ([], [])
    for event in (opened(2, attempt=2), update(2, "a", 99), closed(2, ["a"], attempt=2, train_loss=1.0)):
        history.add(event)
    assert history.train_curve() == [(2, 1.0)]
    assert history.contributions()["a"] == (2, 109)


def test_the_wait_is_the_rest_of_the_round(two_site_run):
    history = History.from_events(two_site_run)
    expected = {"load": 1.0, "train": 10.0, "eval": 2.5, "encode": 0.5, "wait": 6.0}
    assert history.rounds[0].time_split() == expected
    assert history.sites["north"].tokens_per_second == pytest.approx(800 / 30)


def test_the_certificate_is_the_worst_of_the_committed_rounds(two_site_run):
    worst, row, checked = History.from_events(two_site_run).exactness()
    assert (worst, row.round, row.exactness_layer, checked) == (5e-8, 3, "l2", 2)


def test_time_left_is_rounds_left_times_the_median():
    events = [start()]
    for index, total in ((1, 10.0), (2, 30.0), (3, 20.0)):
        events += [opened(index), closed(index, seconds={"total": total})]
    history = History.from_events(events)
    assert history.eta_seconds() == 20.0
    history.add({"t": 100.0} | opened(4))
    assert history.eta_seconds(now=105.0) == 15.0
    assert history.eta_seconds(now=500.0) == 0.0
    assert history.elapsed_seconds(now=105.0) == 104.0


def test_nan_metrics_read_as_not_known_h38():
    record = closed(1, ["a"], train_loss=None, heldout=None, exactness=None, seconds=None)
    history = History.from_events([start(), opened(1), update(1, "a", loss=None, tokens=None), record])
    assert history.train_curve() == history.heldout_curve() == []
    assert history.exactness() is None
    assert history.contributions() == {"a": (1, 0)}


def test_a_run_that_committed_nothing_says_so_h29(failed_run):
    history = History.from_events(failed_run)
    found = summarise(history)
    assert (found["outcome"], found["exit_code"], found["rounds_committed"]) == ("failed", 75, 0)
    assert (found["tokens"], found["sites_contributed"], found["state_crc"]) == (0, [], None)
    assert [(r.round, r.site, r.kind) for r in history.refused] == [
        (1, "north", "exception"),
        (1, "south", "exception"),
    ]


def test_the_summary_of_a_run(two_site_run):
    found = summarise(History.from_events(two_site_run))
    assert (found["rounds_committed"], found["rounds_skipped"]) == (2, 1)
    assert (found["heldout_loss_first"], found["heldout_loss_last"], found["train_loss_last"]) == (
        4.0,
        2.0,
        3.0,
    )
    assert (found["tokens"], found["bytes_up"], found["bytes_down"]) == (600, 4000, 12000)
    assert (found["exactness_relative_error"], found["state_crc"]) == (5e-8, "crc3")
    assert found["elapsed_seconds"] == 210.0


_NAMES = [n.removeprefix("_on_") for n in dir(History) if n.startswith("_on_")]
_KEYS = [
    "t",
    "round",
    "attempt",
    "site",
    "sites",
    "loss",
    "accepted",
    "rejected",
    "missing",
    "selected",
    "seconds",
]
_KEYS += [
    "tokens",
    "bytes",
    "late",
    "heldout",
    "exactness",
    "outcome",
    "reason",
    "versions",
    "config",
    "rounds",
]
_KEYS += [
    "resumed_from",
    "where",
    "when",
    "prompt",
    "answer",
    "train_loss",
    "total",
    "train",
    "relative_error",
]
_small = st.sampled_from(["a", "b", "commit", "skip", "sites", "before", "", "<b>\x1b[31m"])
_leaf = st.none() | st.booleans() | st.integers(-5, 600) | st.floats(allow_nan=False) | _small
_value = st.recursive(
    _leaf,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4),
    max_leaves=8,
)
_event = st.builds(
    lambda name, fields: fields | {"event": name},
    st.sampled_from(_NAMES),
    st.dictionaries(st.sampled_from(_KEYS), _value, max_size=8),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(_event, max_size=12))
def test_no_event_content_can_break_history_or_report(events):
    history = History.from_events(events)
    summarise(history)
    list(metric_rows(history))
    assert "\x1b" not in header(history) + last_round_line(history) + footer(history)
    assert "<b>" not in render_report(history)
