"""From rows to token ids and labels: what is learned is the assistant's words and the mark that ends them.

Labels are NOT shifted (the model, or `packing.supervised_positions`, shifts once); -100 = not supervised. The
first label of a row is always -100, since no token precedes it.

- A conversation is tokenised as one text; a token is supervised when it holds a character of an assistant
  span (`template.py`), so the mask is right also where a token straddles prompt and completion.
- The row ends with exactly one EOS, supervised. If the template's own end-of-turn mark is another token, both
  stay.
- Longer than `max_length`: first up to half of the prompt goes, from its left; then the end of the completion
  (which then has no EOS: the answer does not end there). A row with nothing supervised left is dropped and
  counted: an answer to a question that is mostly gone would be learned as noise.
- A text row is text + EOS in chunks of `max_length` that overlap by one token, so every token but the first
  is a target exactly once.

Counts hold numbers only and may leave the site. Nothing is cached on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from umbel.data.formats import RowFormat, to_messages
from umbel.data.template import ChatFormat, Span, resolve_format
from umbel.errors import ConfigError

IGNORE = -100  # the label torch's cross entropy leaves out
_BATCH = 512


@dataclass(frozen=True)
class Encoded:
    """One row: `input_ids` int32 [T] and `labels` int32 [T], -100 = not supervised, not shifted."""

    input_ids: np.ndarray
    labels: np.ndarray

    @property
    def num_supervised(self) -> int:
        """Number of tokens that are predicted: labels from the second on that are not -100."""
        return int((self.labels[1:] != IGNORE).sum())


@dataclass
class EncodeCounts:
    """What became of the source rows: rows = kept + dropped_empty + dropped_refused + dropped_truncated.

    `shortened` of the kept rows lost a part to `max_length`; `duplicates` repeat an earlier row and are kept;
    `folded_system` had system text that the template does not take; `dropped_refused` had turns it does not
    take.
    """

    rows: int = 0
    kept: int = 0
    dropped_truncated: int = 0
    dropped_empty: int = 0
    dropped_refused: int = 0
    shortened: int = 0
    folded_system: int = 0
    duplicates: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name, ready for a metrics record."""
        return asdict(self)


@dataclass
class EncodedSet:
    """Encoded rows, the source row of each (`source[i]`; text rows give several) and the counts."""

    rows: list[Encoded] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    counts: EncodeCounts = field(default_factory=EncodeCounts)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_supervised(self) -> int:
        """Number of supervised tokens of all rows."""
        return sum(row.num_supervised for row in self.rows)


@dataclass(frozen=True)
class _Document:
    index: int
    text: str
    spans: list[Span] | None  # None = all of it is learned and long ones are chunked
    raw: bool  # not rendered by the tokenizer's own template: its BOS has to be added


def encode_rows(
    rows: Sequence[Mapping[str, Any]],
    fmt: RowFormat,
    tokenizer: Any,
    *,
    max_length: int,
    completion_only: bool = True,
    template: str = "auto",
) -> EncodedSet:
    """Encode the rows with a transformers tokenizer; see the module's text for the rules.

    completion_only=False supervises the prompt too. Raises ConfigError for max_length < 2, and what
    `resolve_format` raises.
    """
    if max_length < 2:
        raise ConfigError(
            "data.max-length",
            "is too small",
            got=max_length,
            allowed=">= 2",
            remedy="Use the model's context length.",
        )
    chat = resolve_format(tokenizer, template)
    result = EncodedSet()
    documents = _documents(rows, fmt, chat, result.counts)
    bos = _default_bos(tokenizer)
    while batch := list(islice(documents, _BATCH)):
        tokenised = _tokenise(tokenizer, batch)
        for document, (ids, mask) in zip(batch, tokenised, strict=True):
            ids, mask = _close(ids, mask, tokenizer.eos_token_id, bos if document.raw else None)
            if document.spans is None or not completion_only:
                mask[:] = True
            mask[0] = False
            chunked = document.spans is None
            pieces = _chunks(ids, mask, max_length) if chunked else _fit(ids, mask, max_length, bos)
            _collect(result, document, pieces, len(ids) > max_length and not chunked)
    return result


def _documents(
    rows: Sequence[Mapping[str, Any]], fmt: RowFormat, chat: ChatFormat, counts: EncodeCounts
) -> Iterator[_Document]:
    seen: set[bytes] = set()
    for index, row in enumerate(rows):
        counts.rows += 1
        messages = to_messages(row, fmt)
        if messages is None:
            counts.dropped_empty += 1
            continue
        if isinstance(messages, str):
            document = _Document(index, messages, None, raw=True)
        else:
            rendered = chat.spans(messages)
            if rendered is None:
                counts.dropped_refused += 1
                continue
            counts.folded_system += chat.folds_system and any(turn["role"] == "system" for turn in messages)
            document = _Document(index, *rendered, raw=chat.is_plain)
        key = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
        counts.duplicates += key in seen
        seen.add(key)
        yield document


def _tokenise(tokenizer: Any, batch: Sequence[_Document]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    texts = [document.text for document in batch]
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    if not tokenizer.is_fast:
        for document in batch:
            yield _tokenise_by_prefix(tokenizer, document, options)
        return
    encoding = tokenizer(texts, return_offsets_mapping=True, **options)
    for document, ids, offsets in zip(batch, encoding["input_ids"], encoding["offset_mapping"], strict=True):
        spans = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        yield np.array(ids, dtype=np.int32), _mask_of_offsets(spans[:, 0], spans[:, 1], document.spans or [])


def _mask_of_offsets(begin: np.ndarray, end: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return bool [T]: the token holds a character of a span; an empty token counts as the one before."""
    mask = np.zeros(len(begin), dtype=bool)
    for start, stop in spans:
        mask |= np.where(begin == end, (start < end) & (end <= stop), (begin < stop) & (end > start))
    return mask


def _tokenise_by_prefix(
    tokenizer: Any, document: _Document, options: Mapping[str, bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Mask without offsets: a span begins where the ids of the text before it stop agreeing."""
    ids = tokenizer(document.text, **options)["input_ids"]
    mask = np.zeros(len(ids), dtype=bool)
    for start, stop in document.spans or []:
        first = _num_common(ids, tokenizer(document.text[:start], **options)["input_ids"])
        until = tokenizer(document.text[:stop], **options)["input_ids"]
        last = _num_common(ids, until)
        mask[first : last + (last < len(until))] = (
            True  # the token that straddles the end holds completion, too
        )
    return np.array(ids, dtype=np.int32), mask


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def _default_bos(tokenizer: Any) -> int | None:
    """Return the BOS id if this tokenizer puts it before plain text by itself."""
    bos = tokenizer.bos_token_id
    ids = tokenizer("", add_special_tokens=True)["input_ids"]
    return bos if bos is not None and ids[:1] == [bos] else None


def _close(ids: np.ndarray, mask: np.ndarray, eos: int, bos: int | None) -> tuple[np.ndarray, np.ndarray]:
    """End the row with exactly one EOS, begin it with BOS where one is due; returns fresh arrays."""
    size = len(ids)
    while size and ids[size - 1] == eos:
        size -= 1
    head = [] if bos is None or (size and ids[0] == bos) else [bos]
    closed = np.concatenate([np.array(head, dtype=np.int32), ids[:size], np.array([eos], dtype=np.int32)])
    learned = np.concatenate([np.zeros(len(head), dtype=bool), mask[:size], np.array([True])])
    return closed.astype(np.int32), learned


def _chunks(ids: np.ndarray, mask: np.ndarray, max_length: int) -> list[Encoded]:
    pieces = []
    for start in range(0, len(ids) - 1, max_length - 1):
        piece, learned = ids[start : start + max_length], mask[start : start + max_length].copy()
        learned[0] = False
        pieces.append(_encoded(piece, learned))
    return pieces


def _fit(ids: np.ndarray, mask: np.ndarray, max_length: int, bos: int | None) -> list[Encoded]:
    excess = len(ids) - max_length
    if excess > 0:
        prompt_tokens = int(np.argmax(mask))
        head = int(bos is not None and ids[0] == bos)
        cut = min(excess, prompt_tokens // 2)
        ids = np.concatenate([ids[:head], ids[head + cut :]])[:max_length]
        mask = np.concatenate([mask[:head], mask[head + cut :]])[:max_length]
        learned = np.flatnonzero(mask)
        size = int(learned[-1]) + 1 if len(learned) else 0
        ids, mask = ids[:size], mask[:size]  # a user turn whose answer was cut away teaches nothing
    return [_encoded(ids, mask)] if mask.any() else []


def _encoded(ids: np.ndarray, mask: np.ndarray) -> Encoded:
    return Encoded(np.ascontiguousarray(ids), np.where(mask, ids, IGNORE).astype(np.int32))


def _collect(result: EncodedSet, document: _Document, pieces: list[Encoded], too_long: bool) -> None:
    counts = result.counts
    if not pieces:
        counts.dropped_truncated += 1
        return
    counts.kept += 1
    counts.shortened += too_long
    result.rows.extend(pieces)
    result.source.extend([document.index] * len(pieces))
