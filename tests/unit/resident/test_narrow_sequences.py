"""How long packed sequences are: nothing lost, nothing split, and no more attention than the rows need on a CPU."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from client_app.batches import NARROW_TOKENS, sequences
from umbel.data.encode import Encoded


def row(length: int) -> Encoded:
    ids = np.arange(length, dtype=np.int32)
    return Encoded(ids, ids.copy())


def test_equal_rows_are_not_joined_where_attention_would_pay_for_it() -> None:
    found = sequences([row(300)] * 8, max_tokens=2048, packing=True)
    assert [len(s.input_ids) for s in found] == [300] * 8
    assert [
        len(s.input_ids) for s in sequences([row(300)] * 8, max_tokens=2048, packing=True, wide=True)
    ] == [1800, 600]


def test_short_rows_share_a_sequence_and_never_exceed_what_the_run_allows() -> None:
    assert [len(s.input_ids) for s in sequences([row(32)] * 16, max_tokens=2048, packing=True)] == [256, 256]
    assert [len(s.input_ids) for s in sequences([row(32)] * 16, max_tokens=64, packing=True)] == [64] * 8


@given(st.lists(st.integers(2, 400), min_size=1, max_size=20), st.booleans())
def test_every_supervised_token_is_kept(lengths, wide) -> None:
    found = sequences([row(n) for n in lengths], max_tokens=512, packing=True, wide=wide)
    assert sum(len(s.targets) for s in found) == sum(n - 1 for n in lengths)
    bound = 512 if wide else max(NARROW_TOKENS, *lengths)
    assert all(len(s.input_ids) <= bound for s in found)
