"""The built-in federation: three institutions, three formats, one report style."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from umbel.data import RowFormat, detect_format, heldout_split, load_rows, sources, to_messages

FORMATS = {
    "clinic": RowFormat.QUESTION_ANSWER,
    "workshop": RowFormat.INSTRUCTION,
    "kitchen": RowFormat.MESSAGES,
}
SIGNATURES = {"clinic": "clinic desk", "workshop": "workshop bench", "kitchen": "kitchen pass"}


def answers(name):
    rows = load_rows(f"demo:{name}")
    turns = [turn for row in rows for turn in to_messages(row, FORMATS[name])]
    return [turn["content"] for turn in turns if turn["role"] == "assistant"]


@pytest.mark.parametrize("name", FORMATS)
def test_demo_site_is_small_plain_and_without_repetition(name):
    path = Path(sources.__file__).parent / "demo" / f"{name}.jsonl"
    assert path.read_bytes().isascii()
    assert path.stat().st_size <= 150_000
    rows = load_rows(f"demo:{name}")
    assert len(rows) == 300
    assert detect_format(rows) is FORMATS[name]
    assert len({str(row) for row in rows}) == 300
    assert len(heldout_split(rows, 0.1)[1]) >= 20


@pytest.mark.parametrize("name", FORMATS)
def test_demo_answers_share_one_style_and_carry_their_site(name):
    style = re.compile(rf"Topic: [^.]+\.( [A-Z][a-z ]+: [^.]+\.){{1,2}} Signed: {SIGNATURES[name]}\.")
    assert [text for text in answers(name) if not style.fullmatch(text)] == []


def test_demo_sites_use_labels_of_their_own():
    labels = {
        name: {m for text in answers(name) for m in re.findall(r"([A-Z][a-z ]+):", text)} for name in FORMATS
    }
    assert set.intersection(*labels.values()) == {"Topic", "Signed"}
    assert {name: len(found) for name, found in labels.items()} == {"clinic": 6, "workshop": 6, "kitchen": 6}
