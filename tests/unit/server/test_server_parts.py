"""The small parts of the server: round policy, held-out sums, spool, mailbox, norms."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from support.fakegrid import FakeGrid, FakeSite, VirtualClock

from server_app.heldout import combine
from server_app.mailbox import Mailbox
from server_app.policy import RoundPolicy, Verdict, adaptive_deadline, num_asked
from server_app.spool import Entry, Spool
from server_app.validate import read_heldout, read_metrics, update_norm
from umbel.messages import Reply, plain_metrics

POLICY = RoundPolicy(goal=4, quorum=2, deadline_seconds=100, grace_seconds=10)


@pytest.mark.parametrize(
    ("elapsed", "answered", "accepted", "since", "verdict"),
    [
        (1, 0, 0, None, Verdict.WAIT),
        (1, 2, 2, 0.0, Verdict.WAIT),
        (50, 2, 2, 9.9, Verdict.WAIT),
        (50, 2, 2, 10.0, Verdict.COMMIT),
        (1, 4, 4, 0.0, Verdict.COMMIT),
        (1, 5, 2, 0.0, Verdict.COMMIT),
        (1, 5, 1, None, Verdict.SKIP),
        (100, 1, 1, None, Verdict.SKIP),
        (100, 3, 2, 5.0, Verdict.COMMIT),
    ],
)
def test_policy(elapsed, answered, accepted, since, verdict) -> None:
    got = POLICY.decide(
        elapsed_seconds=elapsed, asked=5, answered=answered, accepted=accepted, since_quorum_seconds=since
    )
    assert got is verdict


@pytest.mark.parametrize(
    ("goal", "factor", "available", "want"),
    [
        (8, 0, 100, 8),
        (16, 0, 100, 21),
        (12, 0, 100, 14),
        (4, 1.5, 100, 6),
        (4, 1.5, 5, 5),
        (10, 1.3, 100, 13),
    ],
)
def test_over_provisioning(goal, factor, available, want) -> None:
    assert num_asked(goal, factor, available) == want


def test_adaptive_deadline_is_median_plus_six_mad_clamped() -> None:
    arrivals = [10, 11, 12, 13, 14, 15, 16, 17]
    # median 13.5, deviations 3.5 2.5 1.5 .5 .5 1.5 2.5 3.5: median 2.0
    assert adaptive_deadline(arrivals, 1, 1000) == pytest.approx(25.5)
    assert adaptive_deadline(arrivals, 60, 1000) == 60
    assert adaptive_deadline(arrivals, 1, 20) == 20
    assert adaptive_deadline(arrivals[:7], 1, 1000) == 1000


def test_heldout_is_summed_over_tokens_and_a_nan_is_left_out() -> None:
    """H38: a NaN metric is excluded from the mean and counted."""
    sums = {
        "a": {"loss_sum": 3.0, "tokens": 1, "correct": 1},
        "b": {"loss_sum": 5.0, "tokens": 3, "correct": 1},
        "c": {"loss_sum": math.nan, "tokens": 3, "correct": 1},
    }
    got = combine(sums)
    assert got is not None
    assert (got["loss"], got["token_accuracy"], got["tokens"], got["excluded"]) == (2.0, 0.5, 4, 1)
    assert got["perplexity"] == pytest.approx(math.exp(2.0))
    assert combine({}) is None


@pytest.mark.parametrize(
    "bad",
    [
        "not json",
        "[1]",
        '{"heldout": 3}',
        '{"heldout": {"loss_sum": true}}',
        '{"heldout": {"loss_sum": -1, "tokens": 2, "correct": 0}}',
    ],
)
def test_odd_metrics_never_cost_an_update(bad) -> None:
    reply = Reply("r", 1, 1, "b", "a", metrics=bad)
    assert read_heldout(read_metrics(reply)) is None


def test_h38_numbers_of_any_library_are_converted() -> None:
    """H38: np.float32, None, True, a torch scalar, a list, NaN, a string."""
    import json

    import torch

    text = plain_metrics(
        {
            "a": np.float32(1),
            "b": None,
            "c": True,
            "d": torch.tensor(1.5),
            "e": [1, 2.0, None],
            "f": math.nan,
            "g": "x",
        }
    )
    got = json.loads(text)
    assert math.isnan(got.pop("f"))
    assert got == {"a": 1.0, "c": True, "d": 1.5, "e": [1, 2.0], "g": "x"}


def test_spool_spills_to_disk_and_keeps_the_order(tmp_path) -> None:
    spool = Spool(tmp_path, memory_bytes=10)
    for name in ("c", "a", "b"):
        spool.add(name, Entry(Reply("r", 1, 1, "x", name), 1.0, 0.0, 0, ""), name.encode() * 8)
    assert sum(e.path is not None for e in spool.ordered()) == 2
    got = [(entry.reply.site, arrays["frame"]) for entry, arrays in spool.decoded(lambda f, _: {"frame": f})]
    assert got == [(n, n.encode() * 8) for n in ("a", "b", "c")]
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_norm_is_that_of_the_product_whatever_the_gauge() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5)), rng.normal(size=(4, 2))
    state = {"m.lora_A.weight": np.zeros((2, 5)), "m.lora_B.weight": np.zeros((4, 2))}
    turn = rng.normal(size=(2, 2))
    for first, second in ((a, b), (np.linalg.inv(turn) @ a, b @ turn)):
        got = update_norm({"m.lora_A.weight": first, "m.lora_B.weight": second}, state, {"m": 2.0})
        assert got == pytest.approx(2.0 * np.linalg.norm(b @ a), rel=1e-9)


def message(node: int) -> Message:
    return Message(RecordDict({"umbel": ConfigRecord({"n": node})}), node, "train")


def test_f23_one_hanging_pull_holds_up_nobody() -> None:
    """F23: stock Flower let complete replies wait behind a half-uploaded one (191 s for a timeout of 30)."""
    clock = VirtualClock()
    grid = FakeGrid(
        clock, {n: FakeSite(lambda kind, m: Message(RecordDict(), reply_to=m), 0.0) for n in (1, 2, 3)}
    )
    mailbox = Mailbox(grid, threaded=True)
    hang, original = threading.Event(), grid.pull_messages

    def pull(ids):
        if ids == ["m1"]:
            hang.wait(20)
        return original(ids)

    grid.pull_messages = pull
    mailbox.send([(f"s{n}", n, "t", message(n)) for n in (1, 2, 3)])
    got: set[str] = set()
    until = time.monotonic() + 10
    while len(got) < 2 and time.monotonic() < until:
        got |= {d.parcel.site for d in mailbox.poll()}
        time.sleep(0.01)
    assert got == {"s2", "s3"}
    hang.set()
    while len(got) < 3 and time.monotonic() < until:
        got |= {d.parcel.site for d in mailbox.poll()}
        time.sleep(0.01)
    assert got == {"s1", "s2", "s3"}


@pytest.mark.parametrize("threaded", [False, True])
def test_replies_wait_for_whoever_asked(threaded) -> None:
    grid = FakeGrid(
        VirtualClock(), {n: FakeSite(lambda kind, m: Message(RecordDict(), reply_to=m), 0.0) for n in (1, 2)}
    )
    mailbox = Mailbox(grid, threaded=threaded)
    mailbox.send([("s1", 1, "join", message(1)), ("s2", 2, "train", message(2))])
    joins: list[str] = []
    until = time.monotonic() + 10
    while not joins and time.monotonic() < until:
        joins += [d.parcel.site for d in mailbox.poll(lambda p: p.tag == "join")]
        time.sleep(0.01)
    time.sleep(0.05)
    trains: list[str] = []
    while not trains and time.monotonic() < until:
        trains += [d.parcel.site for d in mailbox.poll(lambda p: p.tag == "train")]
        time.sleep(0.01)
    assert (joins, trains) == (["s1"], ["s2"])


def test_a_node_that_left_fails_at_once() -> None:
    grid = FakeGrid(VirtualClock(), {1: FakeSite(lambda kind, m: None, online=False)})
    failed = Mailbox(grid, threaded=False).send([("s1", 1, "t", message(1))])
    assert [(f.parcel.site, f.message) for f in failed] == [("s1", None)]
    assert "left" in failed[0].failure
