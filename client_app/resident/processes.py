"""Processes by (pid, start time): a pid alone may name somebody else by the time it is used. Linux only."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process that cannot be mistaken for another: its id and its start, in clock ticks since boot."""

    pid: int
    start: int


def _stat(pid: int) -> list[str]:
    # The command's name stands in brackets and may hold anything; the fields after the last ")" are plain.
    return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def process(pid: int) -> Process | None:
    """Return the running process of that id, or None; one that only waits to be reaped does not run."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else Process(pid, int(fields[19]))


def alive(known: Process) -> bool:
    """Return whether this very process still runs."""
    return process(known.pid) == known


def kill_group(known: Process) -> bool:
    """End the process and its group at once; False when it was gone already."""
    if not alive(known):
        return False
    with suppress(ProcessLookupError):
        # A worker leads its group. Should it ever not, only the process itself is ours to end.
        if os.getpgid(known.pid) == known.pid:
            os.killpg(known.pid, signal.SIGKILL)
        else:
            os.kill(known.pid, signal.SIGKILL)
    return True


def ancestors() -> list[tuple[Process, list[str]]]:
    """Return (process, command line) of the parents of this process, nearest first."""
    found: list[tuple[Process, list[str]]] = []
    pid = os.getppid()
    while pid > 0:
        known = process(pid)
        if known is None:
            break
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            pid = int(_stat(pid)[1])
        except OSError:
            break
        found.append((known, line))
    return found


def supernode() -> Process | None:
    """Return the SuperNode that this process works for: the worker must not outlive it.

    Without one among the parents (a SuperExec in a container of its own) it is the SuperExec, else the parent.
    """
    parents = ancestors()
    for wanted in ("flower-supernode", "flower-superexec"):
        for known, line in parents:
            if any(Path(word).name == wanted for word in line[:4]):
                return known
    return parents[0][0] if parents else None


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def oom_kills() -> int:
    """Return how often the kernel ended a process of our cgroup for want of memory; 0 where it does not say."""
    with suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1].split(":", 2)[2].lstrip("/")
        for folder in (Path("/sys/fs/cgroup") / group, Path("/sys/fs/cgroup")):
            events = folder / "memory.events"
            if events.is_file():
                words = events.read_text().split()
                return int(dict(zip(words[::2], words[1::2], strict=False)).get("oom_kill", 0))
    return 0
