"""Where a site's worker is found, and what it must agree with.

The folder is `$XDG_RUNTIME_DIR/umbel`, else `<state-dir>/.resident`; mode 0700, ours, or it is not used. Four files
carry the name of the slot, a hash of (site name, state folder, uid):

    .sock    the socket, 0600        .lock   held while a message's process finds or starts the worker
    .alive   held by the worker      .json   progress, for `umbel site status`;  .log  the worker's own log

One slot has one worker. The key says what that worker must be: code, versions, protocol, visible devices. A worker
with another key leaves before the next one starts, because two would hold two base models.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from umbel.errors import ConfigError

PROTOCOL = 1
PACKAGES = ("umbel", "compression", "client_app")
VERSIONED = ("torch", "transformers", "peft", "numpy")


@dataclass(frozen=True)
class Place:
    """The files of one site's worker."""

    folder: Path
    slot: str

    def file(self, kind: str) -> Path:
        """Return the path of one of the slot's files: sock, lock, alive, json, log or out."""
        return self.folder / f"{self.slot}.{kind}"

    def prepare(self) -> None:
        """Create the folder; raises ConfigError when others own it or may enter it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(
                "state-dir",
                "holds a folder for the worker's socket that is not private",
                got=f"{self.folder}, uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}",
                allowed=f"uid {os.getuid()}, mode 700",
                remedy=f"chmod 700 {self.folder}, or name another state-dir in the node config.",
            )

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Hold the slot's lock: find-or-start is done by one process at a time; TimeoutError otherwise."""
        handle = hold(self.file("lock"), seconds)
        try:
            yield
        finally:
            handle.close()

    def connect(self) -> socket.socket | None:
        """Return a connection to the slot's worker, or None when nobody listens."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Through the descriptor: a socket's path may have 107 bytes, a state folder's has no such limit.
            channel.connect(f"/proc/self/fd/{handle}/{self.slot}.sock")
        except (FileNotFoundError, ConnectionRefusedError):
            channel.close()
            return None
        finally:
            os.close(handle)
        return channel

    def listen(self) -> socket.socket:
        """Return the listening socket, mode 0600; a leftover of a killed worker is replaced."""
        self.file("sock").unlink(missing_ok=True)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        before = os.umask(0o177)
        try:
            channel.bind(f"/proc/self/fd/{handle}/{self.slot}.sock")
        finally:
            os.umask(before)
            os.close(handle)
        channel.listen(8)
        return channel


def hold(path: Path, seconds: float) -> IO[str]:
    """Return a handle that holds the file's lock until it is closed; TimeoutError after `seconds`."""
    handle = open(path, "a", encoding="utf-8")  # noqa: SIM115 - the caller closes it
    os.chmod(path, 0o600)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() >= deadline:
                handle.close()
                raise TimeoutError(f"{path.name} is held by another process") from None
            time.sleep(0.02)


def place_of(site: str, state_dir: Path) -> Place:
    """Return the place of a site's worker; two sites, or two state folders, never share one."""
    state_dir = state_dir.absolute()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "umbel" if runtime and Path(runtime).is_dir() else state_dir / ".resident"
    slot = hashlib.sha256(json.dumps([site, str(state_dir), os.getuid()]).encode()).hexdigest()[:16]
    return Place(folder, slot)


def code_digest(root: Path) -> str:
    """Return a digest of the code that a worker started from `root` would run."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def key_of(root: Path, node_config: Mapping[str, Any]) -> str:
    """Return the key: everything that makes another worker necessary, as canonical JSON."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return json.dumps(
        {
            "protocol": PROTOCOL,
            "uid": os.getuid(),
            "code": code_digest(root),
            "python": sys.version.split()[0],
            "interpreter": sys.executable,
            "versions": found,
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
            "memory": str(node_config.get("memory-bytes", 0)),
        },
        sort_keys=True,
    )
