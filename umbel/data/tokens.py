"""A corpus as token ids on disk: tokenised once, read through memory maps, cut into blocks of one length.

    stream   = ids(document 1) eos ids(document 2) eos ..            uint16 where the vocabulary fits, else uint32
    block b  = stream[b L .. b L + L]     L inputs, L targets (each the next token); the L targets are its own alone
    digest   = SHA-256 of the stream's bytes

The folder is named by the digests of source, share and tokenizer; it appears whole or not at all, so a process that
is killed while it tokenises leaves nothing that could be read. Held-out blocks are a function of the number of blocks
alone and are never handed out for training: no target of theirs is a target there.

Positions of training blocks count from 0 in a list without the held-out ones: what leases and cursors speak of.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from umbel.data.documents import documents, source_digest
from umbel.errors import DataError
from umbel.fsio import write_durable
from umbel.seeds import generator

FORMAT = 1
SHARD_TOKENS = 1 << 26
DOCUMENTS_A_CALL = 64


@dataclass(frozen=True)
class Corpus:
    """Token shards on disk; `digest` names the stream, `num_tokens` its length."""

    folder: Path
    dtype: str
    num_tokens: int
    digest: str
    shards: tuple[tuple[str, int], ...]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids [start, stop) as int64; they may lie in several shards."""
        pieces, at = [], 0
        for name, size in self.shards:
            low, high = max(start, at), min(stop, at + size)
            if low < high:
                shard = np.memmap(self.folder / name, dtype=self.dtype, mode="r")
                pieces.append(np.asarray(shard[low - at : high - at], np.int64))
            at += size
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


class Blocks:
    """Some blocks of a corpus; item i is int64 [L + 1]: inputs are all but the last id, targets all but the first."""

    def __init__(self, corpus: Corpus, length: int, chosen: np.ndarray) -> None:
        self.corpus, self.length, self.chosen = corpus, length, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, position: int) -> np.ndarray:
        start = int(self.chosen[position]) * self.length
        return self.corpus.read(start, start + self.length + 1)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def stack(self, positions: Iterable[int]) -> np.ndarray:
        """Return the blocks at `positions` as int64 [B, L + 1]."""
        return np.stack([self[int(i)] for i in positions])


def blocks_of(corpus: Corpus, length: int, *, fraction: float, most: int = 0) -> tuple[Blocks, Blocks]:
    """Return (training blocks, held-out blocks), both in order of the stream.

    Held out are round(fraction x blocks), at most `most` (0: no cap), and at least one where fraction > 0 and two
    blocks are there. Raises DataError when not a single block is left to train on.
    """
    count = max(0, corpus.num_tokens - 1) // length
    wanted = max(1, round(fraction * count)) if fraction > 0 and count > 1 else 0
    wanted = min(wanted, most or wanted, count - 1) if count else 0
    order = np.argsort(generator(0, "heldout", count).bit_generator.random_raw(count), kind="stable")
    if count - wanted <= 0:
        raise DataError(
            f"The corpus has {corpus.num_tokens} tokens, not one block of data.max-length = {length} and its next "
            "token. Give more text or a smaller data.max-length."
        )
    heldout, train = np.sort(order[:wanted]), np.sort(order[wanted:])
    return Blocks(corpus, length, train), Blocks(corpus, length, heldout)


def load_corpus(
    source: str,
    tokenizer: Any,
    tokenizer_digest: str,
    cache: Path,
    *,
    share: tuple[int, int] = (0, 1),
    limit: int = 0,
) -> Corpus:
    """Return the tokenised corpus, made on first use; raises DataError when the source holds no text."""
    cache.mkdir(parents=True, exist_ok=True)
    named = [FORMAT, source_digest(source, cache / "notes"), list(share), limit, tokenizer_digest]
    folder = cache / hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]
    with open(cache / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "index.json").is_file():
            _write(folder, documents(source, share, limit), tokenizer, named)
    index = json.loads((folder / "index.json").read_text())
    return Corpus(
        folder, index["dtype"], index["tokens"], index["sha256"], tuple((n, s) for n, s in index["shards"])
    )


def _write(folder: Path, texts: Iterator[str], tokenizer: Any, named: list[Any]) -> None:
    from umbel.models.directory import atomic_directory

    dtype = np.dtype("<u2") if len(tokenizer) <= 1 << 16 else np.dtype("<u4")
    digest, waiting = hashlib.sha256(), 0
    shards: list[list[Any]] = []
    pending: list[np.ndarray] = []
    with atomic_directory(folder) as target:

        def flush() -> None:
            nonlocal pending, waiting
            data = np.concatenate(pending)
            while len(data) >= SHARD_TOKENS or (len(data) and not more):
                name = f"tokens-{len(shards):05d}.bin"
                part, data = data[:SHARD_TOKENS], data[SHARD_TOKENS:]
                write_durable(target / name, part.tobytes())
                digest.update(part.tobytes())
                shards.append([name, len(part)])
            pending, waiting = [data], len(data)

        more = True
        for ids in _ids(texts, tokenizer):
            pending.append(ids.astype(dtype))
            waiting += len(ids)
            if waiting >= SHARD_TOKENS:
                flush()
        more = False
        if pending:
            flush()
        if not shards:
            raise DataError("The source holds no text. Give a source with at least one document.")
        index = {
            "format": FORMAT,
            "dtype": dtype.str,
            "tokens": sum(size for _, size in shards),
            "sha256": digest.hexdigest(),
            "shards": shards,
            "made_of": named,
        }
        write_durable(target / "index.json", json.dumps(index, sort_keys=True).encode())


def _ids(texts: Iterator[str], tokenizer: Any) -> Iterator[np.ndarray]:
    """Yield the ids of every document with its eos; empty documents are left out."""
    while batch := list(islice(texts, DOCUMENTS_A_CALL)):
        kept = [text for text in batch if text.strip()]
        found: Any = tokenizer(kept, add_special_tokens=False, verbose=False)["input_ids"] if kept else []
        for ids in found:
            yield np.array([*ids, tokenizer.eos_token_id], np.uint32)
