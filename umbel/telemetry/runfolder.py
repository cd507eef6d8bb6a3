"""The folder of one run on the server: where each file lies, and how the small ones are written.

    config.toml  environment.json  events.jsonl  metrics.csv  checkpoints/  adapter/  model/  report.html
    summary.json

`events.jsonl` is the source; metrics, report and summary are computed from it and can be made again. The
folder is always named by an absolute path, because Flower starts the server process elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from umbel.errors import DataError
from umbel.fsio import write_atomic
from umbel.telemetry.environment import describe_environment
from umbel.telemetry.events import EventLog
from umbel.telemetry.jsonable import jsonable


class RunFolder:
    """Paths of one run. `create` makes the folder (an existing one is kept: resume), `open` requires it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Make the folder and `checkpoints/` if absent; raises OSError when the place is not writable."""
        folder = cls(path)
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Return an existing run; raises DataError when `path` is not a folder with events or a config."""
        folder = cls(path)
        if not is_run(folder.path):
            raise DataError(
                f"no run in this folder, got {str(path)!r}. Allowed: a folder with events.jsonl or "
                "config.toml. See `umbel ls`; UMBEL_RUNS names the folder that holds the runs."
            )
        return folder

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_toml(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment_json(self) -> Path:
        return self.path / "environment.json"

    @property
    def events_jsonl(self) -> Path:
        return self.path / "events.jsonl"

    @cached_property
    def events(self) -> EventLog:
        """The log to write to (also a path, for the readers). Opening a run to read it writes nothing."""
        return EventLog(self.events_jsonl)

    @property
    def metrics_csv(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def summary_json(self) -> Path:
        return self.path / "summary.json"

    def write_config(self, text: str) -> None:
        """Store the resolved recipe, atomically."""
        write_atomic(self.config_toml, text.encode())

    def write_environment(self) -> dict[str, Any]:
        """Store and return versions and hardware (see `environment`)."""
        found = describe_environment()
        write_atomic(self.environment_json, _dump(found))
        return found

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store the summary, atomically; odd number types are converted, NaN becomes null."""
        write_atomic(self.summary_json, _dump(summary))


def runs_root() -> Path:
    """Return $UMBEL_RUNS, or `runs` in the working directory; read at each call."""
    return Path(os.environ.get("UMBEL_RUNS") or "runs").expanduser().absolute()


def is_run(path: Path) -> bool:
    """True for a folder that holds a run."""
    return (path / "events.jsonl").is_file() or (path / "config.toml").is_file()


def list_runs(root: str | os.PathLike[str] | None = None) -> list[RunFolder]:
    """Return the runs directly under `root` (default `runs_root()`), the most recently written first."""
    base = Path(root) if root is not None else runs_root()
    if not base.is_dir():
        return []
    found = [RunFolder(p) for p in base.iterdir() if p.is_dir() and is_run(p)]
    return sorted(found, key=lambda run: (-_last_write(run), run.name))


def find_run(name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> RunFolder:
    """Return a run by path or by its name under `root`; "" or "latest" is the newest. Raises DataError."""
    text = os.fspath(name)
    base = Path(root) if root is not None else runs_root()
    if text in ("", "latest"):
        runs = list_runs(base)
        if not runs:
            raise DataError(
                f"no run yet, got an empty folder {str(base)!r}. Start one with `umbel run RECIPE`."
            )
        return runs[0]
    return RunFolder.open(base / text if is_run(base / text) else text)


def _last_write(run: RunFolder) -> float:
    for path in (run.events_jsonl, run.config_toml):
        if path.is_file():
            return path.stat().st_mtime
    return 0.0


def _dump(value: Any) -> bytes:
    return json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
