"""The four-part text of a `ModelError`: what is wrong, what was got, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from umbel.errors import ModelError


def model_error(problem: str, *, got: Any, allowed: str, remedy: str) -> ModelError:
    """Return (not raise) a `ModelError` whose message has all four parts."""
    return ModelError(f"{problem}, got {got!r}. Allowed: {allowed}. {remedy}")


def first_three(names: list[str]) -> str:
    """Return at most three names and how many more there are, for an error text."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more


@contextmanager
def readable(what: str, path: Path) -> Iterator[None]:
    """Turn a library's failure to read a file into a `ModelError`; lack of memory stays what it is.

    For a broken or incomplete file the libraries raise a dozen types, some of them bare assertions.
    """
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, RuntimeError) and "memory" in reason:
            raise
        raise model_error(
            f"{what} cannot be read ({type(error).__name__}: {reason})",
            got=str(path),
            allowed="complete files of an architecture this version of Transformers knows, without own code",
            remedy="Copy the model again and compare its checksums.",
        ) from error
