"""Splits, cursors, partitions and digests on hand-made rows (H04)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from umbel.data import Cursor, dataset_digest, files_of, heldout_split, partition, take
from umbel.errors import ConfigError, DataError

ROWS = [{"question": f"Q{i}", "answer": f"A{i}", "label": "abc"[i % 3]} for i in range(60)]
# Recorded: a run that resumes on another version must hold out and read the same rows.
HELDOUT = [1, 11, 13, 14, 15, 19, 20, 23, 30, 33, 38, 40, 41, 45, 51, 56]
ORDER = [2, 7, 3, 4, 5, 0, 6, 1]


def test_heldout_is_a_fixed_choice_that_ignores_ids_and_order():
    train, heldout = heldout_split(ROWS, 0.2)
    assert heldout == HELDOUT
    assert sorted(train + heldout) == list(range(60))
    backwards = [{**row, "id": i} for i, row in enumerate(reversed(ROWS))]
    assert [59 - i for i in reversed(heldout_split(backwards, 0.2)[1])] == heldout
    assert heldout_split(ROWS[:30], 0.2)[1] == [i for i in heldout if i < 30]
    assert heldout_split(ROWS, 0.2, salt="other")[1] != heldout


def test_heldout_keeps_one_training_row_and_can_be_capped():
    assert heldout_split(ROWS[:1], 0.999) == ([0], [])
    assert heldout_split([ROWS[0]] * 3, 0.999) == ([0, 1, 2], [])  # one content cannot be on both sides
    train, heldout = heldout_split(ROWS, 0.999999)
    assert (len(train), len(heldout)) == (1, 59)
    train, heldout = heldout_split(ROWS, 0.5, max_heldout=4)
    assert len(heldout) == 4
    assert set(heldout) < set(heldout_split(ROWS, 0.5)[1])
    assert heldout_split(ROWS, 0) == (list(range(60)), [])
    assert heldout_split([], 0.5) == ([], [])
    with pytest.raises(ConfigError, match=r"heldout-fraction is out of range, got 10\. Allowed: \[0, 1\)"):
        heldout_split(ROWS, 10)


def test_h04_three_rows_fill_a_batch_of_four():
    indices, cursor = take(Cursor(), 3, 4, seed=7, site="a")
    assert sorted(indices[:3].tolist()) == [0, 1, 2]
    assert cursor == Cursor(1, 1)
    following, cursor = take(cursor, 3, 2, seed=7, site="a")
    assert sorted([indices[3], *following]) == [0, 1, 2]
    assert cursor == Cursor(2, 0)


def test_order_is_fixed_for_seed_site_and_epoch():
    assert take(Cursor(), 8, 8, seed=1, site="a")[0].tolist() == ORDER
    orders = [
        take(Cursor(e), 50, 50, seed=s, site=n)[0].tolist()
        for e, s, n in ((0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b"))
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_cursor_edges():
    assert take(Cursor(2, 1), 5, 0, seed=0, site="a")[1] == Cursor(2, 1)
    indices, cursor = take(Cursor(0, 9), 4, 1, seed=0, site="a")  # the data shrank
    assert (cursor, indices.tolist()) == (
        Cursor(1, 1),
        take(Cursor(1, 0), 4, 1, seed=0, site="a")[0].tolist(),
    )
    with pytest.raises(DataError, match="Site 'a' has no rows"):
        take(Cursor(), 0, 4, seed=0, site="a")
    with pytest.raises(ValueError, match="count"):
        take(Cursor(), 4, -1, seed=0, site="a")
    with pytest.raises(ValueError, match="position=-1"):
        Cursor(0, -1)


def test_iid_parts_differ_by_at_most_one():
    parts = partition(ROWS, 7, "iid", seed=3)
    assert sorted(len(part) for part in parts) == [8, 8, 8, 9, 9, 9, 9]
    assert parts == partition(ROWS, 7, "iid", seed=3) != partition(ROWS, 7, "iid", seed=4)


def test_small_alpha_separates_labels_and_large_alpha_mixes_them():
    def largest_share(alpha):
        parts = partition(ROWS * 10, 3, "dirichlet", seed=0, alpha=alpha, column="label")
        return max(max(np.bincount([i % 3 for i in part])) / len(part) for part in parts)

    assert largest_share(1e-3) > 0.99
    assert largest_share(1e4) < 0.4


def test_column_and_file_keep_groups_whole():
    assert partition(ROWS, 3, "column", column="label") == [list(range(start, 60, 3)) for start in range(3)]
    two = partition(ROWS, 2, "column", column="label")
    assert [len(part) for part in two] == [40, 20]
    files = ["b"] * 10 + ["a"] * 50
    assert partition(ROWS, 2, "file", groups=files) == [list(range(10, 60)), list(range(10))]


def test_impossible_partitions_are_named():
    with pytest.raises(DataError, match="need at least 61 rows, got 60"):
        partition(ROWS, 61)
    with pytest.raises(
        DataError, match=r"column 'kind' .* missing in 60 rows\. Found: \['answer', 'label', 'question'\]"
    ):
        partition(ROWS, 2, "dirichlet", column="kind")
    with pytest.raises(DataError, match="4 different groups, got 3"):
        partition(ROWS, 4, "column", column="label")
    with pytest.raises(ConfigError, match="got 'shards'"):
        partition(ROWS, 2, "shards")
    with pytest.raises(ConfigError, match="alpha must be a positive number, got 0"):
        partition(ROWS, 2, "dirichlet", column="label", alpha=0)
    with pytest.raises(ConfigError, match="groups must name the file"):
        partition(ROWS, 2, "file")
    with pytest.raises(ConfigError, match="num_parts is too small, got 0"):
        partition(ROWS, 0)


def test_files_of_a_folder_are_sorted(tmp_path):
    for name in ("b.jsonl", "a.csv", "readme.md", ".c.jsonl"):
        (tmp_path / name).touch()
    assert [file.name for file in files_of(tmp_path)] == ["a.csv", "b.jsonl"]
    with pytest.raises(DataError, match="no folder"):
        files_of(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        files_of(tmp_path / "empty")


def test_digest_counts_rows_and_ignores_their_order():
    row = hashlib.sha256('{"a":1,"b":"\u00fc"}'.encode()).digest()
    expected = hashlib.sha256(b"umbel-rows-1" + (1).to_bytes(8, "little") + row).hexdigest()
    assert dataset_digest([{"b": "\u00fc", "a": 1}]) == expected
    assert dataset_digest(ROWS) == dataset_digest([dict(reversed(row.items())) for row in reversed(ROWS)])
    assert len({dataset_digest(rows) for rows in (ROWS, ROWS[:-1], ROWS + ROWS[:1], [])}) == 4
    assert len(dataset_digest([{"text": "\ud800"}])) == 64  # a lone surrogate out of a JSON escape


def test_importing_the_room_loads_no_heavy_library():
    code = (
        "import sys, umbel.data;"
        "heavy = ('torch', 'transformers', 'datasets', 'pyarrow', 'pandas', 'flwr');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "[]"
