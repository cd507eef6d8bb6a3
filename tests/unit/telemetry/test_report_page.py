from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from umbel.telemetry.events import EventLog
from umbel.telemetry.history import History
from umbel.telemetry.report import render_report, write_report
from umbel.telemetry.runfolder import RunFolder
from umbel.telemetry.verdict import certificate, verdict

VOID = {"meta", "line", "circle", "path", "polygon", "polyline"}


class Page(HTMLParser):
    """Tags balanced, ids unique, and everything a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []
        assert len(self.ids) == len(set(self.ids))
        assert set(self.references) <= set(self.ids)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.stack.append(tag)
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value)
            if name == "aria-labelledby":
                self.references += value.split()

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def visible(page: Page) -> str:
    return " ".join(" ".join(page.text).split())


def test_the_page_is_self_contained_and_runs_nothing(two_site_run):
    text = render_report(History.from_events(two_site_run))
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    links = [a for a in page.attributes if a[1] in ("src", "href", "action") or a[1].startswith("on")]
    assert all(tag == "a" and name == "href" and value[0] == "#" for tag, name, value in links)
    assert {value[1:] for _, _, value in links} <= set(page.ids)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_every_chart_has_a_title_a_description_and_a_table(two_site_run):
    page = Page(render_report(History.from_events(two_site_run)))
    charts = [a for a in page.attributes if a[:2] == ("svg", "aria-labelledby")]
    assert len(charts) == 5
    assert page.tags.count("desc") == 5
    assert page.tags.count("title") == 6
    assert page.tags.count("caption") == page.tags.count("table") == 9
    assert sum(a == ("th", "scope", "row") for a in page.attributes) == 22


def test_the_page_says_what_the_events_say(two_site_run):
    history = History.from_events(two_site_run)
    shown = visible(Page(render_report(history, environment={"packages": {"torch": "2.13.0"}})))
    assert (
        "Held-out loss fell from 4.000 to 2.000 (-50.0%) in 2 committed rounds. 2 of 2 sites contributed."
        in shown
    )
    assert (
        "up to rounding: relative error at most 5.0e-08 (round 3, l2; 2 of 2 committed rounds checked)."
        in shown
    )
    assert "west join tokenizer differs joining 1" in shown
    assert "south oom out of memory 3 1" in shown
    assert "2 1 skip nobody (1 valid, not used) south: no answer" in shown
    assert "3 1 commit north south: out of memory 3.000 200 1.0 kB 4.0 kB 20.0s crc3" in shown
    assert "north 3 2 0 0 500 83.3% 3.0 kB 2.0 kB" in shown
    assert "south 3 1 0 2 100 16.7% 1.0 kB 2.0 kB" in shown
    assert "Why? before no idea after because" in shown
    assert "torch 2.13.0 2.13.0: north; 2.12.0: south" in shown


def test_a_failed_run_looks_failed_h29(failed_run):
    shown = visible(Page(render_report(History.from_events(failed_run))))
    assert "No round was committed: there is no trained model." in shown
    assert "The run failed: 0 of 2 replies (exit code 75)." in shown
    assert "north exception ImportError: peft 1 1" in shown
    assert "1 1 abort nobody north: ImportError: peft; south: ImportError: peft" in shown


def test_a_site_that_gave_nothing_is_named_h29(two_site_run):
    joined = {"event": "site_joined", "site": "east"}
    text = render_report(History.from_events([*two_site_run, joined]))
    assert "In no committed round: east. The model holds nothing from these sites." in text


def test_text_from_outside_is_escaped_everywhere():
    evil = "\"'><script>alert(1)</script><b onload=x>"
    nested = {"loss": 1.0, "sites": {evil: {"loss": 1.0}, "b": {"loss": 2.0}}}
    row = {"round": 1, "site": evil, "tokens": 1, "kind": evil, "reason": evil}
    events = [
        {
            "event": "run_started",
            "run": evil,
            "method": evil,
            "model": evil,
            "task": evil,
            "config": {evil: evil},
        },
        {"event": "site_joined", "site": evil, "versions": {evil: evil}},
        {"event": "site_refused", "site": evil, "reason": evil},
        {"event": "round_opened", "round": 1, "attempt": 1, "selected": [evil, "b"]},
        {"event": "update_accepted"} | row,
        {"event": "site_failed"} | row | {"site": "b"},
        {
            "event": "round_committed",
            "round": 1,
            "outcome": "commit",
            "accepted": [{"site": evil}],
            "state_crc": evil,
            "heldout": nested,
            "exactness": {"relative_error": 0.0, "worst_layer": evil},
        },
        {"event": "sample", "when": evil, "prompt": evil, "answer": evil},
        {"event": "run_finished", "outcome": evil, "reason": evil},
    ]
    text = render_report(History.from_events(events), name=evil, config=evil, environment={"platform": evil})
    page = Page(text)
    assert not {"script", "b"} & set(page.tags)
    assert "<script" not in text
    assert evil in "".join(page.text)


def test_secrets_put_into_a_config_by_mistake_are_hidden():
    history = History.from_events(
        [{"event": "run_started", "config": {"a": {"hub-token": "s3cret", "tokens": 7}}}]
    )
    assert "s3cret" not in render_report(history)
    assert "a.tokens" in render_report(history)
    text = render_report(History(), config='api_key = "s3cret"\n"password" = "s3cret"\nmax-tokens = 512\n')
    assert "s3cret" not in text
    assert "max-tokens = 512" in text


def test_the_report_is_written_from_the_folder_at_any_moment(two_site_run, tmp_path):
    run = RunFolder.create(tmp_path / "r")
    assert "Run - r" in write_report(run.path).read_text("utf-8")
    run.write_config("[run]\nrounds = 3\n")
    for event in two_site_run[:7]:
        EventLog(run.events_jsonl).write(
            event["event"], **{k: v for k, v in event.items() if k not in ("t", "event")}
        )
    with run.events_jsonl.open("a") as file:
        file.write('{"torn')
    shown = visible(Page(write_report(run).read_text("utf-8")))
    assert "[run] rounds = 3" in shown
    assert "1 line(s) of the event log could not be read" in shown
    assert "No round has been committed yet." in shown
    assert str(tmp_path) not in run.report_html.read_text("utf-8")


def long_run(num_rounds: int, num_sites: int) -> list[dict]:
    names = [f"site-{i:02d}" for i in range(num_sites)]
    events: list[dict] = [{"t": 0.0, "event": "run_started", "rounds": num_rounds}]
    for index in range(1, num_rounds + 1):
        events.append({"event": "round_opened", "round": index, "attempt": 1, "selected": names})
        lost = names[index % num_sites]
        kept = [n for n in names if n != lost or num_sites == 1]
        events += [
            {"event": "update_accepted", "round": index, "site": n, "tokens": 5, "seconds": {"train": 1.0}}
            for n in kept
        ]
        losses = {n: {"loss": 5.0 / index + i / 100} for i, n in enumerate(names)}
        events.append(
            {
                "event": "round_committed",
                "round": index,
                "attempt": 1,
                "outcome": "commit",
                "accepted": [{"site": n} for n in kept],
                "missing": [] if num_sites == 1 else [lost],
                "train_loss": 5.0 / index,
                "heldout": {"loss": 5.0 / index, "sites": losses},
                "seconds": {"total": 2.0},
            }
        )
    return events


@pytest.mark.parametrize(("num_rounds", "num_sites"), [(0, 0), (1, 1), (500, 64)])
def test_small_and_large_runs_fit_on_a_page(num_rounds, num_sites):
    text = render_report(History.from_events(long_run(num_rounds, num_sites)))
    page = Page(text)
    assert len(text) < 1_500_000
    for tag, name, value in page.attributes:
        if tag in ("text", "circle", "line") and name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(value) <= 760
    assert not re.search(r"\b(nan|inf|none)\b", text.split("</style>")[1], re.I)
    if num_sites == 64:
        assert "63 of 64" in text
        assert "Each bar is the mean of 9 rounds." in text


def test_verdicts():
    assert verdict(History()) == "No round has been committed yet."
    assert certificate(History()) == ""
    one = long_run(1, 1)
    assert verdict(History.from_events(one)) == (
        "1 committed round; the held-out loss was not measured twice. 1 of 1 sites contributed."
    )
    worse = {"event": "evaluated", "round": 1, "where": "sites", "loss": 6.0}
    assert verdict(History.from_events([*one, worse])) == (
        "Held-out loss rose from 5.000 to 6.000 (+20.0%) in 1 committed round. 1 of 1 sites contributed."
    )


@pytest.mark.parametrize(("error", "exact"), [(0.0, True), (1e-5, True), (1.1e-5, False), (0.0789, False)])
def test_a_method_that_is_not_exact_is_not_called_exact(error, exact):
    record = long_run(1, 1)[-1] | {"exactness": {"relative_error": error, "worst_layer": "k_proj"}}
    said = certificate(History.from_events([*long_run(1, 1)[:-1], record]))
    assert ("up to rounding" in said, "not exact" in said) == (exact, not exact)
    if error == 0.0789:
        assert (
            "by up to 7.89% of its norm in a round (round 1, k_proj; 1 of 1 committed rounds checked)."
            in said
        )
