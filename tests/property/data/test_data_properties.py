"""Properties of order, split, partition, packing and masks for any input (H02, H04, H05, H06)."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.data import (
    IGNORE,
    Cursor,
    Encoded,
    RowFormat,
    dataset_digest,
    encode_rows,
    heldout_split,
    pack_rows,
    pad_rows,
    partition,
    supervised_positions,
    take,
)

few = settings(max_examples=50, deadline=None)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
row_lists = st.lists(
    st.fixed_dictionaries({"question": texts, "answer": texts, "label": st.sampled_from("abc")}), max_size=25
)


@st.composite
def encoded_rows(draw):
    size = draw(st.integers(1, 20))
    ids = np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), np.int32)
    kept = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    return Encoded(ids, np.where(kept, ids, IGNORE).astype(np.int32))


@few
@given(st.integers(1, 12), st.lists(st.integers(0, 15), max_size=6), st.integers(0, 3))
def test_steps_of_any_size_read_the_same_rows_h04(num_rows, steps, seed):
    cursor, pieces = Cursor(), []
    for count in steps:
        indices, cursor = take(cursor, num_rows, count, seed=seed, site="s")
        pieces.extend(indices.tolist())
    together, end = take(Cursor(), num_rows, sum(steps), seed=seed, site="s")
    assert (pieces, cursor) == (together.tolist(), end)
    assert cursor.epoch * num_rows + cursor.position == len(pieces)
    for start in range(0, len(pieces) - num_rows + 1, num_rows):
        assert sorted(pieces[start : start + num_rows]) == list(range(num_rows))


@few
@given(row_lists, st.floats(0, 0.99), st.integers(0, 5), st.randoms(use_true_random=False))
def test_split_covers_all_rows_and_never_separates_equal_content(rows, fraction, cap, random):
    rows = rows + rows[:2]
    train, heldout = heldout_split(rows, fraction, max_heldout=cap)
    assert sorted(train + heldout) == list(range(len(rows)))
    assert train or not rows
    assert not cap or len(heldout) <= cap
    order = random.sample(range(len(rows)), len(rows))
    _, moved = heldout_split([rows[i] for i in order], fraction, max_heldout=cap)
    assert sorted(order[i] for i in moved) == heldout
    content = [tuple(rows[i][key].strip() for key in ("question", "answer")) for i in range(len(rows))]
    assert not {content[i] for i in train} & {content[i] for i in heldout}
    assert dataset_digest(rows) == dataset_digest([rows[i] for i in order])


@few
@given(
    row_lists,
    st.integers(1, 5),
    st.sampled_from(["iid", "dirichlet"]),
    st.integers(0, 9),
    st.floats(1e-6, 1e6),
)
def test_partition_places_every_row_once_and_leaves_no_part_empty(rows, num_parts, scheme, seed, alpha):
    if len(rows) < num_parts:
        return
    parts = partition(rows, num_parts, scheme, seed=seed, alpha=alpha, column="label")
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    assert len(parts) == num_parts
    assert all(parts)


@few
@given(st.lists(encoded_rows(), max_size=12), st.integers(20, 50))
def test_packing_keeps_every_supervised_token_and_its_context_h02(rows, max_tokens):
    packed = pack_rows(rows, max_tokens)
    assert all(len(row.input_ids) <= max_tokens for row in packed)
    assert sum(row.num_supervised for row in packed) == sum(row.num_supervised for row in rows)
    segments = []
    for row in packed:
        starts = [*np.flatnonzero(row.position_ids == 0).tolist(), len(row.input_ids)]
        keep, targets = supervised_positions(row)
        assert len(keep) == row.num_supervised
        assert (row.input_ids[keep + 1] == targets).all()
        assert not set((keep + 1).tolist()) & set(starts)
        for start, stop in pairwise(starts):
            segments.append((row.input_ids[start:stop].tolist(), row.labels[start + 1 : stop].tolist()))
    assert sorted(segments) == sorted((row.input_ids.tolist(), row.labels[1:].tolist()) for row in rows)
    batch = pad_rows(rows, pad_id=1)
    assert batch.num_supervised == sum(row.num_supervised for row in packed)
    assert batch.attention_mask.sum() == sum(len(row.input_ids) for row in rows)


@lru_cache(maxsize=1)
def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("n", "t"), (":", "\u0120"), ("\u0120", "a"), ("a", "a"), ("\u010a", "a")]
    symbols = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


words = st.text("a :\n.\u00e9\U0001f600", min_size=1, max_size=8).filter(lambda text: text.strip())


@few
@given(st.lists(st.tuples(words, words), min_size=1, max_size=3), st.integers(2, 60))
def test_answers_and_their_ends_are_what_is_learned_h05_h06(pairs, max_length):
    tokenizer = _tokenizer()
    turns = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    (full,) = encode_rows([{"messages": turns}], RowFormat.MESSAGES, tokenizer, max_length=10_000).rows
    learned = tokenizer.decode(full.labels[full.labels != IGNORE])
    # A token that straddles ': ' or ':' and an answer brings its prompt character along.
    assert learned.replace(": ", " ") == "".join(f" {a.strip()}<eos>" for _, a in pairs).replace(": ", " ")
    assert full.input_ids[-1] == full.labels[-1] == tokenizer.eos_token_id
    assert (full.input_ids == tokenizer.eos_token_id).sum() == len(pairs)
    cut = encode_rows([{"messages": turns}], RowFormat.MESSAGES, tokenizer, max_length=max_length)
    assert cut.counts.kept + cut.counts.dropped_truncated == 1
    for row in cut.rows:
        assert len(row.input_ids) <= max_length
        assert row.num_supervised >= 1
        assert row.labels[-1] != IGNORE
