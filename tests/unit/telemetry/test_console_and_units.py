from __future__ import annotations

import pytest

from umbel.telemetry.console import footer, header, last_round_line, round_line
from umbel.telemetry.history import History
from umbel.telemetry.records import RoundRow
from umbel.telemetry.units import change, count, duration, loss, moment, one_line, size


def test_a_round_is_one_line(two_site_run):
    history = History.from_events(two_site_run)
    first, _, third = history.rounds
    assert round_line(first, None, 3) == (
        "round 1/3  loss 4.500  sites 2/2  late 0 dropped 0  up 2.0 kB down 4.0 kB  "
        "load 1.0s train 10.0s eval 2.5s encode 0.5s wait 6.0s  commit"
    )
    assert round_line(third, first, 3) == (
        "round 3/3  loss 3.000 (-1.500)  sites 1/2  late 0 dropped 1  up 1.0 kB down 4.0 kB  "
        "load 1.0s train 10.0s eval 2.5s encode 0.5s wait 6.0s  commit  [south: out of memory]"
    )
    assert last_round_line(history) == round_line(third, first, 3)


def test_a_second_attempt_and_unknown_numbers_are_shown_as_such():
    assert round_line(RoundRow(round=2, attempt=3, outcome="skip")) == (
        "round 2 attempt 3  loss -  sites 0/0  late 0 dropped 0  up 0 B down 0 B  skip"
    )
    assert last_round_line(History()) == ""


def test_head_and_foot_name_the_run_and_who_contributed_h29(two_site_run, failed_run):
    history = History.from_events(two_site_run)
    assert header(history) == "run r: fedit, sft\nmodel m  rounds 3  sites 2"
    assert footer(history) == (
        "completed: 2/3 rounds in 3m30s\n"
        "held-out loss 4.000 -> 2.000 (-2.000)\n"
        "up 4.0 kB  down 12.0 kB\n"
        "site north: 2 rounds, 500 tokens\n"
        "site south: 1 rounds, 100 tokens\n"
        "exactness: relative error <= 5.0e-08 (round 3; 2 rounds checked)"
    )
    assert footer(History.from_events(failed_run)).startswith("failed: 0/5 rounds in 5.0s (0 of 2 replies)")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (2_100_000, "2.1 MB"),
        (3e9, "3.0 GB"),
        (7.5e15, "7500.0 TB"),
    ],
)
def test_sizes_are_decimal(num_bytes, text):
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0.0s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (75, "1m15s"),
        (3599.6, "1h00m"),
        (4000, "1h06m"),
        (86400 * 2 + 3600 * 5, "2d05h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_other_numbers():
    assert [loss(v) for v in (None, 0, 2.3141, 1e-4, 1e7)] == ["-", "0.000", "2.314", "1.00e-04", "1.00e+07"]
    assert [change(2.0, 3.0), change(3.0, 2.0), change(None, 1.0)] == ["-1.000", "+1.000", ""]
    assert [count(None), count(1234567)] == ["-", "1,234,567"]
    assert [moment(1764556800.0), moment(None), moment(1e300)] == ["2025-12-01 02:40 UTC", "-", "-"]
    assert one_line("a\x1b[31m\nb\u202e") == "a [31m b "
