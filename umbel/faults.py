"""Scripted faults: which process breaks how, in which round, at which point. For tests and drills only.

    plan = FaultPlan(log)
    plan.at("b", round=2, point="after_train", do="kill")
    plan.at("server", round=3, point="in_checkpoint", do="kill")
    environ["UMBEL_FAULTS"] = plan.to_json()

A plan travels in the environment variable UMBEL_FAULTS, as JSON or as the path of a JSON file, and is read when
an app starts, never at import. Without the variable nothing here does anything. Each fault that fires is first
written, durably, to the plan's log: a process that is started again does not fire it twice, and a test asserts
that `unfired()` is empty.

What the words do: `kill` SIGKILL to the own process, `exit` ends it with code 9 without clean-up, `raise` an
InjectedFault, `delay` sleeps `seconds`, `hang` sleeps until somebody ends the process, `nan` asks the caller to
spoil its numbers. Faults of links and whole machines are not made here: tests stop processes and cut connections.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from umbel.errors import ConfigError

VARIABLE = "UMBEL_FAULTS"
SERVER = "server"
SERVER_POINTS = (
    "dispatch",
    "first_reply",
    "before_commit",
    "after_commit",
    "in_checkpoint",
    "after_checkpoint",
)
SITE_POINTS = ("before_train", "mid_train", "after_train", "before_send", "mid_upload", "after_send")
ACTIONS = ("kill", "raise", "nan", "delay", "hang", "exit")


class InjectedFault(RuntimeError):
    """Raised by the action 'raise'."""


@dataclass(frozen=True)
class Fault:
    """One planned fault. `who` is 'server' or a site's name, `round` counts from 1."""

    who: str
    round: int
    point: str
    do: str
    seconds: float = 0.0

    def __post_init__(self) -> None:
        points = SERVER_POINTS if self.who == SERVER else SITE_POINTS
        for key, value, allowed in (("point", self.point, points), ("do", self.do, ACTIONS)):
            if value not in allowed:
                raise ConfigError(
                    f"{VARIABLE}.{key}", "is unknown", got=value, allowed=" | ".join(map(repr, allowed))
                )


@dataclass
class FaultPlan:
    """Faults and the file that says which of them have fired; an empty plan costs one comparison a point."""

    log: Path | None = None
    faults: list[Fault] = field(default_factory=list)

    def at(self, who: str, *, round: int, point: str, do: str, seconds: float = 0.0) -> FaultPlan:
        """Add one fault and return the plan."""
        self.faults.append(Fault(who, round, point, do, seconds))
        return self

    def to_json(self) -> str:
        """Return the text for UMBEL_FAULTS."""
        return json.dumps({"log": str(self.log or ""), "faults": [asdict(f) for f in self.faults]})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> FaultPlan:
        """Return the plan of UMBEL_FAULTS, an empty one without it; raises ConfigError when it is not a plan."""
        text = (os.environ if environ is None else environ).get(VARIABLE, "")
        if not text:
            return cls()
        try:
            if not text.lstrip().startswith("{"):
                text = Path(text).read_text("utf-8")
            value = json.loads(text)
            return cls(
                Path(value["log"]) if value.get("log") else None, [Fault(**f) for f in value["faults"]]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                VARIABLE,
                f"is not a fault plan ({type(error).__name__}: {error})",
                got=text[:80],
                allowed='{"log": PATH, "faults": [{"who", "round", "point", "do", "seconds"}]}, or a file of it',
                remedy="Unset it: it is meant for tests.",
            ) from error

    def fired(self) -> list[dict[str, Any]]:
        """Return the faults that have fired, in order."""
        if self.log is None or not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text("utf-8").splitlines() if line]

    def unfired(self) -> list[Fault]:
        """Return the planned faults that have not fired; a test asserts that there are none."""
        left = [row["fault"] for row in self.fired()]
        return [f for f in self.faults if not _take(left, asdict(f))]

    def planned(self, who: str, round: int, point: str) -> Fault | None:
        """Return the next fault due here, without firing it."""
        here = [f for f in self.faults if (f.who, f.round, f.point) == (who, round, point)]
        if not here:
            return None
        waiting = self.unfired()
        return next((f for f in here if f in waiting), None)

    def fire(self, who: str, round: int, point: str) -> str:
        """Do what is planned here, once; returns 'nan' when the caller is to spoil its numbers, else ''."""
        fault = self.planned(who, round, point)
        if fault is None:
            return ""
        self._write(fault)
        if fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.do == "exit":
            os._exit(9)
        if fault.do == "raise":
            raise InjectedFault(f"planned at {point} of round {round}")
        if fault.do == "delay":
            time.sleep(fault.seconds)
        while fault.do == "hang":
            time.sleep(1.0)
        return fault.do if fault.do == "nan" else ""

    def _write(self, fault: Fault) -> None:
        if self.log is None:
            # Without a log the plan remembers for itself: enough for one process.
            self.faults.remove(fault)
            return
        row = json.dumps({"fault": asdict(fault), "pid": os.getpid(), "t": time.time()}) + "\n"
        with open(self.log, "a", encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            handle.write(row)
            handle.flush()
            os.fsync(handle.fileno())


def _take(rows: list[dict[str, Any]], wanted: dict[str, Any]) -> bool:
    if wanted in rows:
        rows.remove(wanted)
        return True
    return False
