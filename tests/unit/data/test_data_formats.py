"""Telling row formats apart and turning rows into turns."""

from __future__ import annotations

import pytest

from umbel.data import RowFormat, detect_format, to_messages
from umbel.data.formats import row_content
from umbel.errors import ConfigError, DataError

USER = {"role": "user", "content": "Q"}
ASSISTANT = {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("row", "fmt", "messages"),
    [
        ({"messages": [USER, ASSISTANT]}, RowFormat.MESSAGES, [USER, ASSISTANT]),
        ({"messages": [SYSTEM, USER, ASSISTANT, USER]}, RowFormat.MESSAGES, [SYSTEM, USER, ASSISTANT]),
        (
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            RowFormat.MESSAGES,
            [USER, ASSISTANT],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, ASSISTANT]},
            RowFormat.MESSAGES,
            [USER, ASSISTANT],
        ),
        ({"prompt": " Q ", "completion": " A"}, RowFormat.PROMPT_COMPLETION, [USER, ASSISTANT]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, RowFormat.PROMPT_COMPLETION, [USER, ASSISTANT]),
        ({"question": "Q", "answer": "A", "type": "x"}, RowFormat.QUESTION_ANSWER, [USER, ASSISTANT]),
        (
            {"question": "Q", "answer": "A", "system": "S"},
            RowFormat.QUESTION_ANSWER,
            [SYSTEM, USER, ASSISTANT],
        ),
        (
            {"context": "C", "question": "Q", "answer": "A"},
            RowFormat.QUESTION_ANSWER,
            [{"role": "user", "content": "C\n\nQ"}, ASSISTANT],
        ),
        ({"instruction": "Q", "input": "", "output": "A"}, RowFormat.INSTRUCTION, [USER, ASSISTANT]),
        (
            {"instruction": "Q", "input": "I", "output": "A", "text": "Q I A"},
            RowFormat.INSTRUCTION,
            [{"role": "user", "content": "Q\n\nI"}, ASSISTANT],
        ),
        ({"text": "T", "id": "7"}, RowFormat.TEXT, "T"),
    ],
)
def test_formats_are_detected_and_read(row, fmt, messages):
    assert detect_format([row]) is fmt
    assert detect_format([row], fmt.value) is fmt
    assert to_messages(row, fmt) == messages


def test_odd_rows_do_not_change_what_is_detected():
    rows = [{"text": "x"}, {"question": "Q", "answer": "A"}, {"question": "Q", "answer": None}, {}, "x", None]
    rows += [{"question": "R", "answer": "A"}]
    assert detect_format(rows) is RowFormat.QUESTION_ANSWER
    assert [to_messages(row, RowFormat.QUESTION_ANSWER) is None for row in rows] == [
        True,
        False,
        True,
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "turns",
    [None, "text", [], [USER], [{"role": "user"}], ["x"], [{"role": "user", "content": 3}, ASSISTANT],
     [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]],
)  # fmt: skip
def test_unusable_conversations_are_none(turns):
    assert to_messages({"messages": turns}, RowFormat.MESSAGES) is None


def test_a_file_that_begins_with_many_empty_rows_is_still_read():
    assert (
        detect_format([{"text": ""}] * 1500 + [{"question": "Q", "answer": "A"}]) is RowFormat.QUESTION_ANSWER
    )


def test_errors_name_columns_and_formats_but_no_content():
    with pytest.raises(DataError, match="No row fits any known row format, got 1 rows") as caught:
        detect_format([{"frage": "secret", "antwort": "secret"}])
    text = str(caught.value)
    assert "['antwort', 'frage']" in text
    assert all(fmt.value in text for fmt in RowFormat)
    assert "secret" not in text
    with pytest.raises(DataError, match="got 0 rows"):
        detect_format([])
    with pytest.raises(DataError, match="'instruction'"):
        detect_format([{"text": "x"}], "instruction")
    with pytest.raises(ConfigError, match=r"data\.format is not a known row format, got 'alpaca'"):
        detect_format([{"text": "x"}], "alpaca")


def test_content_ignores_ids_and_order_of_columns():
    assert row_content({"question": "Q", "answer": "A", "id": 1}) == row_content(
        {"id": 2, "answer": "A ", "question": "Q"}
    )
    assert row_content({"question": "Q", "answer": "A"}) != row_content({"question": "Q", "answer": "B"})
    assert row_content({"x": 1}) != row_content({"x": 2})
