"""The shapes of row that institutions bring, told apart by their columns.

| format            | columns (first that exists)                                                            |
|-------------------|----------------------------------------------------------------------------------------|
| messages          | messages, conversations, conversation or dialog: {role, content} or {from, value} each |
| prompt_completion | prompt + completion, response, output, answer or target                                |
| instruction       | instruction + output, response, completion or answer; optional input or context        |
| question_answer   | question + answer, response or output; optional context                                |
| text              | text, document or content                                                              |

An optional `system` column becomes a system turn. A row that does not fit (a column missing, None, not a
string, empty) is not an error: `to_messages` returns None and the caller counts it. The row's other columns
are ignored. It does not guess what a column means from its content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypedDict

from umbel.data.digest import canonical_json
from umbel.errors import ConfigError, DataError


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


Messages = list[Message]


class RowFormat(StrEnum):
    """How a row is read. The order is the order of preference when several fit equally well."""

    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt_completion"
    INSTRUCTION = "instruction"
    QUESTION_ANSWER = "question_answer"
    TEXT = "text"


# Per format: the groups of which a row must have one column each.
_COLUMNS: dict[RowFormat, tuple[tuple[str, ...], ...]] = {
    RowFormat.MESSAGES: (("messages", "conversations", "conversation", "dialog"),),
    RowFormat.PROMPT_COMPLETION: (("prompt",), ("completion", "response", "output", "answer", "target")),
    RowFormat.INSTRUCTION: (("instruction",), ("output", "response", "completion", "answer")),
    RowFormat.QUESTION_ANSWER: (("question",), ("answer", "response", "output")),
    RowFormat.TEXT: (("text", "document", "content"),),
}
_SAMPLE = 1000
_CONTEXT = {RowFormat.INSTRUCTION: ("input", "context"), RowFormat.QUESTION_ANSWER: ("context",)}
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}


def detect_format(rows: Sequence[Mapping[str, Any]], explicit: str = "auto") -> RowFormat:
    """Return the format that most of the first 1,000 rows fit; `explicit` names one and is then only checked.

    Raises ConfigError for an unknown name, DataError when there are no rows or none fits. The columns are
    named in the message, their content is not.
    """
    if explicit != "auto":
        return _check_explicit(rows, explicit)
    if not rows:
        raise DataError(
            "There are no rows to detect a format from, got 0 rows. Give a file with at least one row."
        )
    # A sample decides; all rows are asked only where nothing in the sample can be read.
    for sample in (rows[:_SAMPLE], rows):
        counts = {fmt: sum(1 for row in sample if to_messages(row, fmt) is not None) for fmt in RowFormat}
        best = max(RowFormat, key=lambda fmt: counts[fmt])  # max keeps the first of equals: the enum's order
        if counts[best]:
            return best
    raise DataError(_no_fit(rows, "any known row format"))


def _check_explicit(rows: Sequence[Mapping[str, Any]], explicit: str) -> RowFormat:
    try:
        fmt = RowFormat(explicit.replace("-", "_"))
    except ValueError:
        allowed = ", ".join(["auto", *RowFormat])
        raise ConfigError(
            "data.format",
            "is not a known row format",
            got=explicit,
            allowed=allowed,
            remedy="Use auto to detect it.",
        ) from None
    if rows and all(to_messages(row, fmt) is None for row in rows):
        raise DataError(_no_fit(rows, f"the format {fmt.value!r}"))
    return fmt


def _no_fit(rows: Sequence[Mapping[str, Any]], wanted: str) -> str:
    columns = sorted({str(key) for row in rows if isinstance(row, Mapping) for key in row})
    known = "; ".join(
        f"{fmt.value}: " + " + ".join("|".join(group) for group in groups) for fmt, groups in _COLUMNS.items()
    )
    return (
        f"No row fits {wanted}, got {len(rows)} rows with the columns {columns!r}. "
        f"Known formats: {known}. Rename the columns, or check that their values are non-empty strings."
    )


def to_messages(row: Mapping[str, Any], fmt: RowFormat) -> Messages | str | None:
    """Return turns that end with an assistant turn, one string for TEXT, None for an unusable row.

    An instruction and its input are joined by a blank line, a context goes before its question. Turns after
    the last assistant turn are dropped, since nothing in them is learned.
    """
    if not isinstance(row, Mapping):
        return None
    if fmt is RowFormat.MESSAGES:
        return _conversation(_first(row, _COLUMNS[fmt][0]))
    if fmt is RowFormat.TEXT:
        return _string(_first(row, _COLUMNS[fmt][0]))
    asked, answered = (_first(row, group) for group in _COLUMNS[fmt])
    if isinstance(asked, list) and isinstance(answered, list):  # prompt and completion given as turns
        return _conversation([*asked, *answered])
    prompt, completion = _string(asked), _string(answered)
    if prompt is None or completion is None:
        return None
    context = _string(_first(row, _CONTEXT.get(fmt, ())))
    if context is not None:
        prompt = f"{prompt}\n\n{context}" if fmt is RowFormat.INSTRUCTION else f"{context}\n\n{prompt}"
    messages: Messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    system = _string(row.get("system"))
    return [{"role": "system", "content": system}, *messages] if system is not None else messages


def row_content(row: Mapping[str, Any]) -> bytes:
    """Return what a row teaches, as canonical bytes: equal for rows that differ in an id column only.

    A row that fits no format is taken whole.
    """
    for fmt in RowFormat:
        messages = to_messages(row, fmt)
        if messages is not None:
            return canonical_json(messages)
    return canonical_json(row)


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _string(value: Any) -> str | None:
    """Return the string without surrounding space, None if it is no string or empty."""
    return value.strip() or None if isinstance(value, str) else None


def _conversation(turns: Any) -> Messages | None:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return None
    messages: Messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            return None
        role, content = turn.get("role", turn.get("from")), _content(turn.get("content", turn.get("value")))
        if not isinstance(role, str) or content is None:
            return None
        messages.append({"role": _ROLES.get(role, role), "content": content})
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return messages or None


def _content(value: Any) -> str | None:
    """Return a turn's text; a list of {"type": "text", "text": ...} is joined, other parts are unusable."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in value]
        value = "".join(parts) if parts and all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    return _string(value)
