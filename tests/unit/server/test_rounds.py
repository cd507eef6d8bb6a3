"""The round engine over sites made of numbers: quorum, deadlines, refusals, exact results."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from support.scripted import (
    STATE,
    Script,
    changed,
    died,
    edited,
    make_bench,
    refused,
    silent,
    wrap,
    wrap_bytes,
)

from server_app.rounds import RunAborted
from umbel.digest import state_crc

pytestmark = pytest.mark.fault


def trio() -> list[Script]:
    return [Script("a", 1.0, tokens=10), Script("b", 2.0, tokens=30), Script("c", 4.0, tokens=60)]


def test_commit_is_the_token_weighted_mean() -> None:
    bench = make_bench(trio())
    record = bench.engine.run_round()
    assert record["outcome"] == "commit"
    # (10 * 1 + 30 * 2 + 60 * 4) / 100
    assert bench.values == [pytest.approx(3.1, abs=1e-6)] * 3
    assert [entry["site"] for entry in record["accepted"]] == ["a", "b", "c"]


def test_uniform_weights() -> None:
    bench = make_bench(trio(), "clients.weighting=uniform")
    bench.engine.run_round()
    assert bench.values == [pytest.approx(7 / 3, abs=1e-6)] * 3


def test_f00_the_state_does_not_depend_on_who_answers_first() -> None:
    """F00: 60 orders of five replies, one hash."""
    hashes = set()
    rng = np.random.default_rng(0)
    changes = rng.normal(size=5)
    orders = list(itertools.islice(itertools.permutations(range(5)), 0, 120, 2))
    for order in orders:
        scripts = [Script(f"s{i}", float(changes[i]), tokens=7 * i + 3) for i in range(5)]
        delays = {f"s{i}": 1.0 + order[i] for i in range(5)}
        bench = make_bench(scripts, delays=delays)
        bench.engine.run_round()
        hashes.add(state_crc(bench.engine.state))
    assert len(orders) == 60
    assert len(hashes) == 1


def test_f01_a_dead_site_costs_its_update_and_is_named() -> None:
    """F01, H28: error replies of the SuperLink do not name the node; our own map does."""
    scripts = trio()
    scripts[1].faults[1] = died(8)
    bench = make_bench(scripts)
    record = bench.engine.run_round()
    assert record["outcome"] == "commit"
    assert bench.values == [pytest.approx((10 * 1 + 60 * 4) / 70, abs=1e-6)] * 3
    failed = bench.of("site_failed")
    assert [(e["site"], "died" in e["reason"]) for e in failed] == [("b", True)]


def test_f02_a_refusal_names_kind_and_reason() -> None:
    """F02: a site that raised answers with a typed reason; the others count exactly."""
    scripts = trio()
    scripts[0].faults[1] = refused("exception", "ValueError at sft.py:12")
    bench = make_bench(scripts)
    record = bench.engine.run_round()
    assert record["rejected"] == [{"site": "a", "kind": "exception", "reason": "ValueError at sft.py:12"}]
    assert bench.values == [pytest.approx((30 * 2 + 60 * 4) / 90, abs=1e-6)] * 3


def test_h28_a_silent_site_ends_with_the_grace_not_with_the_deadline() -> None:
    """H28, H37: once the quorum is there, the round waits the grace and no longer."""
    scripts = trio()
    scripts[2].faults[1] = silent
    bench = make_bench(scripts)
    start = bench.clock.now()
    record = bench.engine.run_round()
    assert record["outcome"] == "commit"
    assert record["missing"] == ["c"]
    assert 20.0 <= bench.clock.now() - start <= 22.0


def test_deadline_bounds_a_round_below_its_quorum() -> None:
    scripts = trio()
    for script in scripts[1:]:
        script.faults[1] = silent
    bench = make_bench(scripts, "run.max-consecutive-skips=1")
    start = bench.clock.now()
    with pytest.raises(
        RunAborted, match=r"1 of 3 updates accepted in 100 s, 2 needed \(b: no answer; c: no answer\)"
    ):
        bench.engine.run_round()
    assert 100.0 <= bench.clock.now() - start <= 101.0
    assert state_crc(bench.engine.state) == state_crc(STATE)


def test_h29_no_usable_reply_is_never_progress() -> None:
    """H29: a site code that fails everywhere ends the run with every site's reason, state untouched."""
    scripts = trio()
    for script in scripts:
        for r in range(1, 9):
            script.faults[r] = refused("exception", "ImportError at app.py:3")
    bench = make_bench(scripts)
    with pytest.raises(RunAborted) as caught:
        bench.engine.run_round()
    assert all(f"{s.name}: exception: ImportError" in str(caught.value) for s in scripts)
    assert len([e for e in bench.of("round_committed") if e["outcome"] == "skip"]) == 3
    assert bench.engine.round == 0
    assert state_crc(bench.engine.state) == state_crc(STATE)


def test_a_skipped_round_keeps_its_number_and_gets_a_new_attempt() -> None:
    scripts = trio()
    failures = iter([True, True, False])
    fault = refused("oom")
    for script in scripts[1:]:
        script.faults[1] = lambda m, r, a, fault=fault: (
            fault(m, r, a) if next(failures, False) else wrap(m, r, a)
        )
    bench = make_bench(scripts)
    record = bench.engine.run_round()
    assert (record["round"], record["attempt"], record["outcome"]) == (1, 2, "commit")
    assert [(e["round"], e["attempt"]) for e in bench.of("round_opened")] == [(1, 1), (1, 2)]


def test_h31_the_last_one_standing_is_taken_bit_for_bit() -> None:
    """H31: with a quorum of one, the mean of one update is that update."""
    scripts = trio()
    scripts[0].faults[1] = died()
    scripts[1].faults[1] = died()
    bench = make_bench(scripts, "clients.quorum=1")
    bench.engine.run_round()
    expected = {k: v + np.float32(4.0) for k, v in STATE.items()}
    assert state_crc(bench.engine.state) == state_crc(expected)


def test_three_sites_never_become_one_silently() -> None:
    """The default quorum is half of the sites the run started with, not of those that are left."""
    bench = make_bench(trio(), "clients.start-timeout-seconds=30")
    for node in (2, 3):
        bench.grid.sites[node].online = False
    with pytest.raises(RunAborted, match="only 1 of the 2 sites that a quorum needs"):
        bench.engine.run_round()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (edited(weight=0.0), "weight"),
        (edited(weight=-1.0), "weight"),
        (edited(weight=math.nan), "weight"),
        (edited(weight=math.inf), "weight"),
        (edited(tokens=0), "weight"),
        (edited(loss=math.nan), "non_finite"),
        (edited(base="0" * 32), "header"),
        (edited(round=7), "header"),
        (edited(attempt=9), "header"),
        (edited(run="another"), "header"),
        (edited(site="b"), "header"),
        (changed(lambda a: {"w": a["w"]}), "frame"),
        (changed(lambda a: {**a, "extra": a["b"]}), "frame"),
        (changed(lambda a: {**a, "b": a["b"][:1]}), "frame"),
        (changed(lambda a: {**a, "b": a["b"].astype(np.float64)}), "frame"),
        (lambda m, r, a: wrap_bytes(m, r, b"not a frame"), "frame"),
        (lambda m, r, a: wrap(m, r), "layout"),
    ],
)
def test_f32_f33_a_bad_update_is_dropped_and_named(fault, kind) -> None:
    """F30, F32, F33, H24: the bad one is named with its kind; the others' mean is exact."""
    scripts = trio()
    scripts[0].faults[1] = fault
    bench = make_bench(scripts)
    record = bench.engine.run_round()
    assert [(r["site"], r["kind"]) for r in record["rejected"]] == [("a", kind)]
    assert bench.values == [pytest.approx((30 * 2 + 60 * 4) / 90, abs=1e-6)] * 3


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_h24_one_poisoned_coordinate_is_refused(poison: float) -> None:
    """H24, F30: an honest encoder refuses NaN, so the frame is forged byte by byte; the server still drops it."""
    import xxhash

    def forge(message, reply, arrays):
        from compression import Layout, encode

        frame = bytearray(encode(arrays, Layout.from_arrays(arrays)))
        mark = np.float32(arrays["b"][1]).tobytes()
        at = bytes(frame).rindex(mark)
        frame[at : at + 4] = np.float32(poison).tobytes()
        frame[-8:] = xxhash.xxh3_64_intdigest(bytes(frame[:-8])).to_bytes(8, "little")
        return wrap_bytes(message, reply, bytes(frame))

    scripts = trio()
    scripts[2].faults[1] = forge
    bench = make_bench(scripts)
    record = bench.engine.run_round()
    assert [r["site"] for r in record["rejected"]] == ["c"]
    assert "finite" in record["rejected"][0]["reason"]
    assert bench.values == [pytest.approx((10 * 1 + 30 * 2) / 40, abs=1e-6)] * 3


def test_h04_all_weights_zero_is_a_skip_with_a_reason() -> None:
    """H04: stock Flower raises a bare ZeroDivisionError here."""
    scripts = trio()
    for script in scripts:
        script.faults[1] = edited(weight=0.0)
    bench = make_bench(scripts, "run.max-consecutive-skips=1")
    with pytest.raises(RunAborted, match="weight is 0.0"):
        bench.engine.run_round()
    assert state_crc(bench.engine.state) == state_crc(STATE)


def test_weight_is_capped_at_what_the_data_can_give() -> None:
    """F33: a claim of 1e12 tokens counts as the most that a round of this run can hold."""
    scripts = [Script("a", 1.0, tokens=10), Script("b", 2.0, tokens=30)]
    scripts[0].faults[1] = edited(weight=1e12)
    bench = make_bench(scripts, "train.local-steps=1", "train.batch-size=1", "data.max-length=10")
    record = bench.engine.run_round()
    assert [e["weight"] for e in record["accepted"]] == [10.0, 10.0]


def test_f34_an_update_out_of_proportion_is_refused() -> None:
    """F34: ten times the running median of committed norms."""
    scripts = trio()
    scripts[0].change[3] = 1e3
    bench = make_bench(scripts)
    bench.engine.run_round()
    bench.engine.run_round()
    record = bench.engine.run_round()
    assert [(r["site"], r["kind"]) for r in record["rejected"]] == [("a", "norm")]


def test_f09_late_updates_are_dropped_by_default_and_never_counted() -> None:
    """F09: the reply of round 1 arrives in round 2."""
    scripts = trio()
    bench = make_bench(scripts, delays={"c": 25.0})
    first = bench.engine.run_round()
    assert [e["site"] for e in first["accepted"]] == ["a", "b"]
    second = bench.engine.run_round()
    late = [e for e in bench.of("update_rejected") if e["late"]]
    assert [(e["site"], e["round"], e["kind"]) for e in late] == [("c", 1, "late")]
    assert all(not e["late"] for e in second["accepted"])


def test_f09_late_updates_with_weight_follow_the_formula() -> None:
    """F09: w * (1 + age)^-a, and the change is taken against the state the site started from."""
    scripts = trio()
    bench = make_bench(
        scripts,
        "clients.late=weight",
        "clients.staleness-exponent=0.5",
        "clients.goal=2",
        "clients.over-provision=2",
        delays={"c": 3.0, "b": 1.5},
    )
    bench.engine.run_round()
    scripts[2].faults[2] = silent
    bench.grid.sites[1].delay_seconds = bench.grid.sites[2].delay_seconds = 5.0
    before = bench.values[0]
    record = bench.engine.run_round()
    late = [e for e in record["accepted"] if e["late"]]
    assert [(e["site"], e["of_round"]) for e in late] == [("c", 1)]
    w = 60 * 2**-0.5
    assert late[0]["weight"] == pytest.approx(w)
    expected = before + (10 * 1 + 30 * 2 + w * 4) / (40 + w)
    assert bench.values[0] == pytest.approx(expected, rel=1e-6)


def test_normalise_fixed_shrinks_the_step_under_loss() -> None:
    scripts = trio()
    scripts[2].faults[1] = died()
    bench = make_bench(scripts, "clients.normalise=fixed", "clients.weighting=uniform")
    bench.engine.run_round()
    # Two of three equal weights arrived: (1 + 2) / 3, not (1 + 2) / 2.
    assert bench.values == [pytest.approx(1.0, abs=1e-6)] * 3


def test_three_strikes_are_a_quarantine_then_one_probe() -> None:
    scripts = [*trio(), Script("d", 1.0)]
    for r in (1, 2, 3):
        scripts[3].faults[r] = edited(weight=-1.0)
    bench = make_bench(scripts)
    selected = [bench.engine.run_round()["selected"] for _ in range(7)]
    assert ["d" in s for s in selected] == [True, True, True, False, False, True, True]


def test_goal_and_over_provisioning_choose_by_seed() -> None:
    scripts = [Script(f"s{i}", 1.0) for i in range(10)]
    bench = make_bench(scripts, "clients.goal=4", "clients.over-provision=1.5", "clients.minimum=10")
    record = bench.engine.run_round()
    assert len(record["selected"]) == 6
    assert len(record["accepted"]) >= 4
    again = make_bench(
        [Script(f"s{i}", 1.0) for i in range(10)], "clients.goal=4", "clients.over-provision=1.5"
    )
    assert again.engine.run_round()["selected"] == record["selected"]
    other = make_bench(
        [Script(f"s{i}", 1.0) for i in range(10)],
        "clients.goal=4",
        "clients.over-provision=1.5",
        "run.seed=7",
    )
    assert other.engine.run_round()["selected"] != record["selected"]


def test_f16_a_newcomer_joins_and_contributes_in_the_next_round() -> None:
    """F16: at the run's learning-rate position, with the full state."""
    from support.fakegrid import FakeSite

    bench = make_bench(trio())
    bench.engine.run_round()
    newcomer = Script("new", 8.0, tokens=100)
    bench.grid.sites[9] = FakeSite(newcomer, delay_seconds=0.1)
    bench.engine.run_round()
    record = bench.engine.run_round()
    assert "new" in [e["site"] for e in record["accepted"]]
    import json

    order = newcomer.seen[-1]
    steps = bench.engine.ctx.config.train.local_steps
    assert json.loads(order.directives)["first_step"] == (order.round - 1) * steps


def test_h21_h08_a_site_that_differs_is_refused_with_both_fingerprints() -> None:
    """H08, H21: the odd one of three is refused at join; the round runs with the others."""
    scripts = trio()
    for script, print_ in zip(scripts, ("aaaa" * 16, "aaaa" * 16, "bbbb" * 16), strict=True):
        script.facts = {"tokenizer": print_}
    bench = make_bench(scripts, "clients.minimum=2")
    refusals = bench.of("site_refused")
    assert [r["site"] for r in refusals] == ["c"]
    assert "bbbbbbbbbbbb" in refusals[0]["reason"]
    assert "aaaaaaaaaaaa" in refusals[0]["reason"]
    assert bench.engine.run_round()["outcome"] == "commit"


def test_two_sites_of_one_name_the_second_is_refused() -> None:
    bench = make_bench([Script("a", 1.0), Script("a", 2.0), Script("b", 2.0)], "clients.minimum=2")
    assert ["already" in r["reason"] for r in bench.of("site_refused")] == [True]


def test_h39_too_few_sites_end_with_the_reasons_within_the_bound() -> None:
    """H39: stock Flower waits here for ever."""
    from server_app.joining import TooFewSites

    scripts = trio()
    bench = make_bench(scripts, "clients.minimum=5", "clients.start-timeout-seconds=60", join=False)
    with pytest.raises(TooFewSites, match="3 of the 5 sites"):
        bench.engine.ctx.joining.wait_for_start(5, 60.0)
    assert bench.clock.now() <= 61.0


def test_final_evaluation_adds_sums_not_means() -> None:
    bench = make_bench(trio())
    bench.engine.run_round()
    result = bench.engine.evaluate_sites()
    assert result is not None
    assert result["loss"] == 2.0
    assert result["token_accuracy"] == 0.5
    assert result["tokens"] == 6


def test_f24_a_replayed_reply_counts_once() -> None:
    """F24: the grid hands the same reply out again; the mailbox has closed its parcel."""
    bench = make_bench(trio())
    replay = {}
    original = bench.grid.pull_messages

    def twice(ids):
        found = list(original(ids))
        for message in found:
            replay[message.metadata.reply_to_message_id] = message
        return found or [replay[i] for i in ids if i in replay]

    bench.grid.pull_messages = twice
    record = bench.engine.run_round()
    assert len(record["accepted"]) == 3
    bench.engine.run_round()
    assert bench.values == [pytest.approx(6.2, abs=1e-5)] * 3


def test_site_settled_names_the_last_committed_update() -> None:
    scripts = trio()
    scripts[1].faults[2] = died()
    bench = make_bench(scripts)
    for _ in range(3):
        bench.engine.run_round()
    settled = [order.settled for order in bench.scripts["b"].seen if order.round]
    assert settled == ["[0, 0]", "[1, 1]", "[1, 1]"]


def test_replies_of_an_unknown_protocol_version_are_named() -> None:
    scripts = trio()
    scripts[0].faults[1] = lambda m, r, a: wrap(m, replace(r, protocol=99), a)
    bench = make_bench(scripts)
    record = bench.engine.run_round()
    assert "protocol version 99" in record["rejected"][0]["reason"]
