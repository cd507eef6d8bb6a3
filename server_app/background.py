"""One piece of work beside the rounds: a thread, at most one at a time, its result taken in by the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs `work` in a thread; `finish` returns its result or raises what it raised."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether there is work whose result can be had without waiting."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, work: Callable[[], T]) -> None:
        """Begin; RuntimeError when the result of the work before was not taken."""
        if self._thread is not None:
            raise RuntimeError(f"{self.name}: the work before was not finished")
        self._thread = threading.Thread(target=self._run, args=(work,), name=self.name, daemon=True)
        self._thread.start()

    def finish(self) -> T | None:
        """Wait and return the result; None when nothing was started."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, result, error = None, self._result, self._error
        self._result = self._error = None
        if error is not None:
            raise error
        return result

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
