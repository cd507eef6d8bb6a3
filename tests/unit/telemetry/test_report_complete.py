"""Everything the report promises, on an invented run that has all of it; and what it does with what it lacks."""

from __future__ import annotations

import json
import re

import pytest
from support.runs import SITES, full_run

from umbel.telemetry.charts import sparkline
from umbel.telemetry.history import History
from umbel.telemetry.report import render_report, write_report
from umbel.telemetry.runfolder import RunFolder


@pytest.fixture(scope="module")
def history() -> History:
    return History.from_events(full_run())


def section_of(text: str, ident: str) -> str:
    found = re.search(rf'<section aria-labelledby="{ident}">(.*?)</section>', text, re.DOTALL)
    assert found, ident
    return found[1]


PANELS = {
    "loss": ("held-out, lowest to highest site", 'class="band'),
    "bytes": ("received from the sites", "sent to the sites"),
    "sites-map": ("late, still counted (L)", "update rejected"),
    "exactness": ("relative error of the served adapter", "lowest to highest site"),
    "time": ("train", "wait"),
    "sites": ("Loss without it", "Signed", "+0.0500"),
    "refusals": ("update&#x27;s norm is 41.2", "the server started again, from the state after round 14"),
    "measures": ("privacy.epsilon", "split_session.chunks", 'class="spark"'),
    "rounds": ("Lost and why",),
    "config": ("carry",),
    "versions": ("peft", "0.21.1: delft"),
}


@pytest.mark.parametrize("ident", sorted(PANELS))
def test_every_panel_is_there_with_what_belongs_in_it(history, ident) -> None:
    ledger = [{"site": s, "steps": 10, "signed": 1, "loss_change": 0.05} for s in SITES]
    environment = {"packages": {"peft": "0.21.2", "torch": "2.13.0"}}
    text = section_of(render_report(history, ledger=ledger, environment=environment), ident)
    for wanted in PANELS[ident]:
        assert wanted in text, wanted


def test_the_contents_name_every_section_once_and_by_keyboard(history) -> None:
    text = render_report(history)
    nav = re.search(r"<nav[^>]*>(.*?)</nav>", text)
    assert nav
    linked = re.findall(r'href="#([\w-]+)"', nav[1])
    assert linked == re.findall(r'<h2 id="([\w-]+)"', text)
    assert len(linked) == 12


def test_measures_are_means_over_a_round_and_fields_with_a_place_are_none() -> None:
    events = [
        {"event": "round_opened", "round": 1, "selected": ["a"]},
        {"event": "split_session", "round": 1, "site": "a", "chunks": 4, "ok": True},
        {"event": "split_session", "round": 1, "site": "b", "chunks": 8},
        {"event": "round_committed", "round": 1, "outcome": "commit", "drift": 0.5, "privacy": {"epsilon": 1.5, "x": [1]}, "tokens": 9, "train_loss": 1.0, "seconds": {"total": 3.0}},
        {"event": "something", "chunks": 4},
    ]  # fmt: skip
    found = History.from_events(events).measures()
    assert found == {"drift": [(1, 0.5)], "privacy.epsilon": [(1, 1.5)], "split_session.chunks": [(1, 6.0)]}


def test_a_run_without_them_has_no_empty_panel(two_site_run) -> None:
    bare = [e for e in two_site_run if e["event"] != "evaluated"]
    for event in bare:
        event.pop("exactness", None)
    text = render_report(History.from_events(bare))
    assert 'id="exactness"' not in text
    assert 'id="measures"' not in text


def test_the_written_report_takes_steps_and_change_from_the_run_folder(two_site_run, tmp_path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    for event in two_site_run:
        folder.events.write(event["event"], **{k: v for k, v in event.items() if k not in ("t", "event")})
    (folder.path / "leave_one_out.json").write_text(json.dumps({"loss": 2.0, "sites": {"north": 0.125}}))
    assert "+0.1250" in section_of(write_report(folder.path).read_text(), "sites")
    # A ledger of another form is the verifier's affair; the report is written all the same.
    (folder.path / "ledger.jsonl").write_text('{"kind": "round", "round": 1, "entries": [3]}\n')
    assert "+0.1250" not in write_report(folder.path).read_text()


def test_a_sparkline_spans_its_cell_and_stands_for_two_points_or_more() -> None:
    assert sparkline([(1, 2.0)]) == ""
    assert 'points="2.0,20.0 60.0,4.0 118.0,12.0"' in sparkline([(1, 0.0), (2, 2.0), (3, 1.0)])
    assert 'points="2.0,20.0 118.0,20.0"' in sparkline([(1, 5.0), (9, 5.0)])


def test_text_of_others_in_a_measure_is_escaped() -> None:
    events = [{"event": "round_committed", "round": 1, "outcome": "commit", "<b>x": 1.0}]
    assert "<b>x" not in render_report(History.from_events(events))
