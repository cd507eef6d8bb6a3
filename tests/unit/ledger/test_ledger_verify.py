"""A ledger of three rounds and two sites, whole and then touched: the first broken link is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.ledgers import SignedRun

from umbel.ledger import chain, keys
from umbel.ledger.book import Book
from umbel.ledger.manifest import manifest_hash, manifest_in
from umbel.ledger.verify import verify


@pytest.fixture
def run(tmp_path) -> SignedRun:
    run = SignedRun(tmp_path / "run", tmp_path / "keys")
    for index in (1, 2, 3):
        run.round(index)
    return run


def rewrite(run: SignedRun, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the ledger as somebody would who makes all hashes anew."""
    lines = chain.records(run.book.path)
    change(lines)
    run.book.path.unlink()
    for line in lines:
        chain.append(run.book.path, {k: v for k, v in line.items() if k not in ("prev", "hash")})


def test_a_whole_ledger_holds_and_is_counted(run) -> None:
    found = verify(run.folder)
    assert (found.broken, found.rounds, found.entries, found.signed, found.kept) == ("", 3, 6, 6, 6)
    assert found.keys == {s: keys.public_hex(run.key(s)) for s in ("clinic", "kitchen")}


def test_a_resumed_run_is_verified_on_what_stands(run) -> None:
    run.event(event="run_started", resumed_from=1)
    run.book = Book(run.folder)
    run.book.resume(1)
    (first,) = [r for r in chain.records(run.book.path) if r.get("round") == 1]
    run.last = {e["site"]: manifest_hash(e["manifest"]) for e in first["entries"]}
    run.round(2, attempt=2)
    found = verify(run.folder)
    assert (found.broken, found.rounds) == ("", 2)
    # The same record again (a server that died between the book and the event) is not written twice.
    Book(run.folder).commit("r", {"outcome": "commit", "round": 2})
    assert verify(run.folder).rounds == 2


def test_a_site_that_joins_late_or_forgets_is_noted_and_not_refused(run) -> None:
    run.round(4, ("clinic", "kitchen", "workshop"))
    run.last["clinic"] = "unknown"
    run.round(5)
    found = verify(run.folder)
    assert found.broken == ""
    assert found.notes == ["round 5, site clinic: the site had lost its memory and starts a new chain"]


def tokens_raised(lines: list[dict[str, Any]]) -> None:
    lines[1]["entries"][0]["tokens"] = 999


def signed_tokens_raised(lines: list[dict[str, Any]]) -> None:
    tokens_raised(lines)
    lines[1]["entries"][0]["manifest"]["tokens"] = 999


def signature_of_another_round(lines: list[dict[str, Any]]) -> None:
    lines[1]["entries"][0]["manifest"] = lines[0]["entries"][0]["manifest"]


def round_removed(lines: list[dict[str, Any]]) -> None:
    del lines[1]


def site_removed(lines: list[dict[str, Any]]) -> None:
    del lines[1]["entries"][1]


def signature_removed(lines: list[dict[str, Any]]) -> None:
    del lines[2]["entries"][1]["manifest"]


def state_changed(lines: list[dict[str, Any]]) -> None:
    lines[1]["state"] = "00"


def form_broken(lines: list[dict[str, Any]]) -> None:
    lines[0]["entries"] = None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (tokens_raised, "round 2, site clinic: the site signed tokens = 200, not 999"),
        (signed_tokens_raised, "round 2, site clinic: the signature is not the site's"),
        (signature_of_another_round, "round 2, site clinic: the site signed tokens = 100, not 200"),
        (round_removed, "round 3 stands where round 2 should"),
        (site_removed, "round 3, site kitchen: the site names another update as its last one that counted"),
        (signature_removed, "round 3, site kitchen: no signature, though this site signed before"),
        (state_changed, "round 3 was made on state"),
        (form_broken, "ledger.jsonl has a line of another form"),
    ],
)
def test_a_ledger_made_anew_with_right_hashes_is_still_found_out(run, change, named) -> None:
    rewrite(run, change)
    assert verify(run.folder).broken.startswith(named)


def test_a_line_changed_in_place_breaks_the_chain(run) -> None:
    text = run.book.path.read_text()
    run.book.path.write_text(text.replace('"tokens":200', '"tokens":999'))
    assert (
        verify(run.folder).broken == "ledger.jsonl line 2 was changed: its content is not what its hash names"
    )


def test_another_key_under_the_same_name_is_named(run, tmp_path) -> None:
    run.keys = tmp_path / "others"
    run.round(4)
    assert verify(run.folder).broken.startswith("round 4, site clinic: signed with another key")


def test_events_that_tell_another_story_are_named(run) -> None:
    path = run.folder / "events.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([lines[0], lines[1].replace('"weight": 1.0', '"weight": 2.0', 1), lines[2]]) + "\n"
    )
    assert verify(run.folder).broken == "round 2: events.jsonl and ledger.jsonl differ"
    path.write_text("\n".join(lines[:2]) + "\n")
    assert verify(run.folder).broken == "events.jsonl has 2 committed rounds, ledger.jsonl has 3"


def test_a_kept_update_that_is_another_one_is_named(run) -> None:
    (run.folder / "updates" / "round-000003-0001" / "001.frame").write_bytes(b"else")
    assert (
        verify(run.folder).broken == "round 3, site kitchen: the kept update is not the one that was signed"
    )


def test_a_missing_ledger_is_no_good_ledger(tmp_path) -> None:
    assert verify(tmp_path).broken == "ledger.jsonl is missing"


@pytest.mark.parametrize("metrics", ["{", '{"manifest": 1}', '{"manifest": {"v": 1}}', "[]"])
def test_a_manifest_of_another_form_is_none(metrics) -> None:
    assert manifest_in(metrics) is None
