"""Reading rows: every kind of file, and what is said about broken ones."""

from __future__ import annotations

import csv
import json

import pytest

from umbel.data import readers
from umbel.data.sources import demo_sites, load_rows
from umbel.errors import ConfigError, DataError

ROWS = [{"question": 'a, "b"\nc?', "answer": "\u00fc"}, {"question": "d?", "answer": "e"}]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    write(tmp_path / "a.jsonl", jsonl(ROWS))
    write(tmp_path / "lines.json", jsonl(ROWS))
    write(tmp_path / "list.json", json.dumps(ROWS, indent=1))
    write(tmp_path / "table.json", json.dumps({"version": 1, "data": ROWS}))
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 7
    for file in files:
        assert load_rows(str(file)) == ROWS, file.name
        assert load_rows(str(file), limit=1) == ROWS[:1], file.name
    assert sorted(tmp_path.iterdir()) == files  # no cache beside the data
    assert load_rows(write(tmp_path / "one.json", json.dumps({"messages": []}))) == [{"messages": []}]


def test_marks_line_ends_and_blank_lines_do_not_matter(tmp_path):
    for name, content in {
        "bom": b"\xef\xbb\xbf" + jsonl(ROWS).encode(),
        "crlf": jsonl(ROWS).replace("\n", "\r\n\r\n").encode(),
        "utf16": jsonl(ROWS).encode("utf-16"),
        "no-end": jsonl(ROWS).rstrip().encode(),
    }.items():
        assert load_rows(write(tmp_path / f"{name}.jsonl", content)) == ROWS, name
    assert load_rows(write(tmp_path / "bom.csv", b"\xef\xbb\xbfquestion\r\nx\r\n")) == [{"question": "x"}]
    separator = '{"text": "a\u2028b\u0085c"}\n'  # line breaks to str.splitlines, not to JSON lines
    assert load_rows(write(tmp_path / "separator.jsonl", separator)) == [{"text": "a\u2028b\u0085c"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": secret\n', r"a\.jsonl, line 3, column 7 is not JSON"),
        ("b.jsonl", '{"a": 1}\n[1, 2]\n', r"b\.jsonl, line 2 is not an object, got a list"),
        (
            "c.jsonl",
            b'{"a": 1}\n{"a": "\xff"}\n',
            r"c\.jsonl, line 2 is not UTF-8 text, got the byte b'\\xff'",
        ),
        ("d.jsonl", '{"a": ' + "[" * 200_000, r"d\.jsonl, line 1, column \d+ is not JSON"),
        ("e.json", "[1]", r"e\.json, entry 1 is not an object, got a int"),
        ("f.csv", "a,b\n1,2\n1,2,3\n", r"f\.csv, line 3 has the wrong number of fields, got 3\. Allowed: 2"),
        ("g.csv", "a,b\n1\n", r"g\.csv, line 2 has the wrong number of fields, got 1"),
        ("h.csv", 'a\n"x" y\n', r"h\.csv, line 2 is not valid CSV"),
        ("i.csv", b"a\nok\n\xe9t\xe9\n", r"i\.csv, line 3 is not UTF-8"),
        ("j.parquet", b"PAR1 nothing", r"j\.parquet is not a readable Parquet file"),
        ("k.jsonl", "\n \n", r"k\.jsonl holds no rows"),
        ("l.csv", "a,b\n", r"l\.csv holds no rows"),
        ("m.txt", "\n\n", r"m\.txt holds no rows"),
        ("n.json", "", r"n\.json holds no rows"),
        ("o.xlsx", "x", r"unknown kind, got '\.xlsx'\. Allowed: \.jsonl"),
    ],
)
def test_a_broken_file_is_named_with_its_line_and_without_its_content(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message) as caught:
        load_rows(write(tmp_path / name, content))
    assert "secret" not in str(caught.value)


def test_a_huge_line_is_read_and_one_beyond_the_limit_is_named(tmp_path, monkeypatch):
    line = jsonl([{"text": "x" * 1_000_000}])
    path = write(tmp_path / "a.jsonl", line)
    assert len(load_rows(path)[0]["text"]) == 1_000_000
    assert (
        len(load_rows(write(tmp_path / "a.csv", "text\n" + "x" * 1_000_000 + "\n"))[0]["text"]) == 1_000_000
    )
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1000)
    with pytest.raises(DataError, match="line 1 is too long, got more than 1000 bytes"):
        load_rows(path)


def test_sources_that_are_not_there_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder 'org/name'.*hub:ORG/NAME"):
        load_rows("org/name")
    with pytest.raises(DataError, match="holds no data file"):
        load_rows(str(tmp_path))
    with pytest.raises(DataError, match=r"'bakery'.*clinic, kitchen, workshop"):
        load_rows("demo:bakery")
    with pytest.raises(DataError, match="names no data set"):
        load_rows("hub:../x y")
    with pytest.raises(ConfigError, match="limit is negative, got -1"):
        load_rows("demo:clinic", limit=-1)


def test_a_data_set_missing_from_the_hub_is_a_data_error(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"hub:umbel-no-such-org/none \(split 'train'\) cannot be loaded"):
        load_rows("hub:umbel-no-such-org/none")


def test_a_folder_is_read_by_split_in_sorted_order(tmp_path):
    write(tmp_path / "train-2.jsonl", jsonl([{"text": "3"}]))
    write(tmp_path / "train-1.jsonl", jsonl([{"text": "1"}, {"text": "2"}]))
    write(tmp_path / "test.csv", "text\n4\n")
    write(tmp_path / "notes.md", "x")
    write(tmp_path / ".hidden.jsonl", "x")
    assert [row["text"] for row in load_rows(str(tmp_path))] == ["1", "2", "3"]
    assert load_rows(str(tmp_path), split="test") == [{"text": "4"}]
    with pytest.raises(DataError, match=r"no file of the split 'validation', got \['test.csv'"):
        load_rows(str(tmp_path), split="validation")


def test_a_folder_without_split_names_is_all_training_data(tmp_path):
    write(tmp_path / "b.jsonl", jsonl([{"text": "2"}]))
    write(tmp_path / "a.jsonl", jsonl([{"text": "1"}]))
    assert [row["text"] for row in load_rows(str(tmp_path))] == ["1", "2"]
    with pytest.raises(DataError, match="no file of the split 'test'"):
        load_rows(str(tmp_path), split="test")


def test_text_files_one_document_each_in_a_folder_and_chunks_when_alone(tmp_path):
    write(tmp_path / "a.txt", "One.\n\nTwo.\n")
    write(tmp_path / "b.txt", "Three.")
    assert load_rows(str(tmp_path)) == [{"text": "One.\n\nTwo."}, {"text": "Three."}]
    paragraphs = [letter * 900 for letter in "abc"]
    path = write(tmp_path / "c.txt", "\r\n \r\n\r\n".join(paragraphs))
    assert load_rows(path) == [{"text": "\n\n".join(paragraphs[:2])}, {"text": paragraphs[2]}]


def test_demo_sites_are_three():
    assert demo_sites() == ["clinic", "kitchen", "workshop"]
