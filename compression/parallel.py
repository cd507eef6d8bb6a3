"""Run independent segments, in one thread or several: streams restart at segment borders, so the bytes are
the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_threads = 1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` threads for the segments of one frame inside the block; 1 (no pool) is the default."""
    global _threads
    if count < 1:
        raise ValueError(f"threads must be at least 1, got {count!r}")
    before, _threads = _threads, count
    try:
        yield
    finally:
        _threads = before


def for_each(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """[work(item) for item in items], in order; the first exception is raised."""
    items = list(items)
    if _threads == 1 or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(_threads) as pool:
        return list(pool.map(work, items))
