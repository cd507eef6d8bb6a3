"""One writer a run: a file lock, and a token for where locks do not reach.

The lock keeps a second server of the same machine out. On a network disk, or after somebody removed the lock file,
two servers could still believe that they own the run. So each start writes a higher number to `fence.json`, and
a server looks at the file before it writes a checkpoint: a number that is not its own means that a newer server
took the run over, and the older one stops without a trace in the newer one's history.
"""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import IO

from umbel.errors import UmbelError
from umbel.fsio import write_atomic


class Locked(UmbelError):
    """Another server process writes this run folder."""


class Fenced(UmbelError):
    """A newer server has taken this run over."""


class Fence:
    """Lock and token of one run folder; `close` releases the lock, the token stays."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "fence.json"
        self._handle: IO[str] = open(folder / ".lock", "a+")  # noqa: SIM115  (held for the run)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._handle.close()
            raise Locked(
                f"another server is writing {folder}. Wait for it to end, or give this run its own run.output-dir."
            ) from None
        known = self._read()
        # A token that cannot be read may have been any number: the clock gives one that is surely another.
        self.token = known + 1 if known is not None else int(time.time())
        write_atomic(self._path, json.dumps({"token": self.token}).encode())

    def _read(self) -> int | None:
        """Return the token on disk, 0 for none yet, None when it cannot be read."""
        try:
            return int(json.loads(self._path.read_text("utf-8"))["token"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def check(self) -> None:
        """Raise Fenced when a newer server has taken over since."""
        found = self._read()
        if found and found != self.token:
            raise Fenced(
                f"another server (token {found}) has taken over {self._path.parent}; this one (token {self.token}) "
                "stops and writes nothing more."
            )

    def close(self) -> None:
        """Release the lock."""
        self._handle.close()
