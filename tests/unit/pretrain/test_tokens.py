"""Token shards: exact ids, blocks that own their targets, held-out blocks apart, whole or absent on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.data import tokens
from umbel.data.documents import documents
from umbel.data.tokens import Blocks, Corpus, blocks_of, load_corpus
from umbel.errors import DataError
from umbel.models.builtin import byte_tokenizer


def make(folder: Path, text: str, name: str = "a.txt", **more) -> Corpus:
    (folder / name).write_text(text)
    return load_corpus(str(folder / name), byte_tokenizer(), "bytes", folder / "cache", **more)


def test_a_text_file_becomes_its_bytes_and_one_eos(tmp_path) -> None:
    corpus = make(tmp_path, "abc d")
    assert corpus.dtype == "<u2"
    assert corpus.read(0, corpus.num_tokens).tolist() == [97, 98, 99, 32, 100, 257]


def test_rows_of_jsonl_and_parquet_are_documents_and_give_one_digest(tmp_path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "one"}, {"text": ""}, {"text": "two"}]
    jsonl = make(tmp_path, "\n".join(json.dumps(r) for r in rows), "a.jsonl")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    parquet = load_corpus(str(tmp_path / "a.parquet"), byte_tokenizer(), "bytes", tmp_path / "cache")
    assert jsonl.read(0, 99).tolist() == [*b"one", 257, *b"two", 257]
    assert jsonl.digest == parquet.digest
    assert jsonl.folder != parquet.folder


def test_a_share_is_every_nth_document(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in "abcde"))
    assert list(documents(str(tmp_path / "a.jsonl"), (1, 2))) == ["b", "d"]
    assert list(documents(str(tmp_path / "a.jsonl"), (0, 2), 2)) == ["a", "c"]


def test_a_corpus_is_tokenised_once_and_named_by_content_and_tokenizer(tmp_path) -> None:
    first = make(tmp_path, "same text")
    stamp = (first.folder / "index.json").stat().st_mtime_ns
    again = make(tmp_path, "same text")
    assert (again.folder, (again.folder / "index.json").stat().st_mtime_ns) == (first.folder, stamp)
    assert make(tmp_path, "other text").digest != first.digest
    other = load_corpus(str(tmp_path / "a.txt"), byte_tokenizer(), "another", tmp_path / "cache")
    assert other.folder != first.folder


def test_a_tokeniser_that_dies_leaves_nothing(tmp_path, monkeypatch) -> None:
    def dies(path: Path, data: bytes) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tokens, "write_durable", dies)
        with pytest.raises(OSError, match="no space"):
            make(tmp_path, "text")
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []
    assert make(tmp_path, "text").num_tokens == 5


def test_blocks_that_cross_shards_read_the_same(tmp_path, monkeypatch) -> None:
    whole = make(tmp_path, "0123456789" * 5)
    monkeypatch.setattr(tokens, "SHARD_TOKENS", 7)
    parts = load_corpus(str(tmp_path / "a.txt"), byte_tokenizer(), "parts", tmp_path / "cache")
    assert len(parts.shards) == 8
    assert parts.digest == whole.digest
    np.testing.assert_array_equal(parts.read(0, 51), whole.read(0, 51))
    np.testing.assert_array_equal(Blocks(parts, 4, np.array([1]))[0], whole.read(4, 9))


@given(st.integers(2, 400), st.integers(1, 16), st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 5))
def test_every_target_is_in_one_block_and_no_heldout_target_is_trained_on(
    num, length, fraction, most
) -> None:
    corpus = Corpus(Path("."), "<u2", num, "", ())
    count = (num - 1) // length
    if count == 0:
        with pytest.raises(DataError, match="not one block"):
            blocks_of(corpus, length, fraction=fraction, most=most)
        return
    train, held = blocks_of(corpus, length, fraction=fraction, most=most)

    def targets(blocks: Blocks) -> list[int]:
        return [int(b) * length + 1 + i for b in blocks.chosen for i in range(length)]

    assert sorted(targets(train) + targets(held)) == list(range(1, count * length + 1))
    assert len(train) >= 1
    assert len(held) <= (most or count)


def test_a_large_vocabulary_gets_four_bytes_a_token(tmp_path) -> None:
    class Wide:
        eos_token_id = 128_001

        def __len__(self) -> int:
            return 128_256

        def __call__(self, texts, **options):
            return {"input_ids": [[127_999] for _ in texts]}

    (tmp_path / "a.txt").write_text("x")
    corpus = load_corpus(str(tmp_path / "a.txt"), Wide(), "wide", tmp_path / "cache")
    assert (corpus.dtype, corpus.read(0, 2).tolist()) == ("<u4", [127_999, 128_001])


def test_no_text_is_said(tmp_path) -> None:
    with pytest.raises(DataError, match="holds no text"):
        make(tmp_path, "  \n")
    with pytest.raises(DataError, match="no text in"):
        load_corpus(str(tmp_path / "missing.txt"), byte_tokenizer(), "b", tmp_path / "cache")
    (tmp_path / "b.jsonl").write_text('{"question": "q"}')
    with pytest.raises(DataError, match="column 'text' or 'content'"):
        load_corpus(str(tmp_path / "b.jsonl"), byte_tokenizer(), "b", tmp_path / "cache")
