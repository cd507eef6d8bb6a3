"""The lease book: exactly once under any churn, also when the server is killed and reads a checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server_app.leases import LeaseError, LeaseTable
from umbel.data.leases import positions


def test_spans_are_lent_in_order_and_the_rest_of_a_partial_round_comes_back_first() -> None:
    table = LeaseTable()
    assert table.lend("a", 4, 10) == [(0, 0, 4)]
    assert table.lend("b", 4, 10) == [(0, 4, 8)]
    assert table.commit("a", 1) == (1, 3)
    assert table.commit("b", 4) == (4, 0)
    assert table.lend("a", 4, 10) == [(0, 1, 4), (0, 8, 9)]
    # A lost update: the lease is lent again.
    assert table.give_back("a") == 4
    assert table.lend("c", 5, 10) == [(0, 1, 4), (0, 8, 10)]
    assert table.lend("d", 2, 10) == [(1, 0, 2)]
    table.check()


def test_positions_are_disjoint_within_an_epoch_and_shuffled_anew_in_the_next() -> None:
    first = positions([(0, 0, 7), (0, 7, 20)], 20, seed=3)
    assert sorted(first) == list(range(20))
    second = positions([(1, 0, 20)], 20, seed=3)
    assert sorted(second) == list(range(20))
    assert first.tolist() != second.tolist()
    np.testing.assert_array_equal(positions([(0, 5, 9)], 20, seed=3), first[5:9])
    with pytest.raises(ValueError, match=r"within 0\.\.20"):
        positions([(0, 5, 21)], 20, seed=3)


def test_a_book_that_lost_or_doubled_a_block_is_found_out() -> None:
    table = LeaseTable()
    table.lend("a", 4, 10)
    table.free = [(0, 3, 10)]
    with pytest.raises(LeaseError, match="block 3 is lost or counted twice"):
        table.check()
    table.free = [(0, 5, 10)]
    with pytest.raises(LeaseError, match="block 4"):
        table.check()
    with pytest.raises(LeaseError, match="11 training blocks, the book 10"):
        table.lend("b", 1, 11)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.sampled_from(["lend", "commit", "drop", "kill"]), st.integers(0, 9)
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(st.integers(1, 23), ACTIONS)
def test_exactly_once_under_churn(num_blocks, actions) -> None:
    """Row 13: 0 blocks lost and 0 committed twice in an epoch, for any order of leases, losses and SIGKILLs.

    A kill brings back the book of the last commit, and with it the list of what was really trained on.
    """
    table, trained = LeaseTable(), []
    saved = json.dumps(table.state()), list(trained)
    for site, action, amount in actions:
        if action == "lend":
            table.lend(site, amount, num_blocks)
        elif action == "commit":
            held = [(e, i) for e, a, b in table.lent.get(site, []) for i in range(a, b)]
            used = min(amount, len(held))
            table.commit(site, used)
            trained += held[:used]
            saved = json.dumps(table.state()), list(trained)
        elif action == "drop":
            table.give_back(site)
        else:
            table = LeaseTable()
            table.restore(json.loads(saved[0]))
            trained = list(saved[1])
        table.check()
        assert len(set(trained)) == len(trained)
        assert table.blocks_committed == len(trained)
        entered = [(e, i) for e, spans in table.committed.items() for a, b in spans for i in range(a, b)]
        assert sorted(entered) == sorted(trained)
