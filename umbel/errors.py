"""Errors with four parts, and the typed refusals a site answers with.

Every message says what is wrong, what was got, what is allowed and what to do about it, so that neither an
operator at a hospital nor a test has to guess.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

# sysexits.h: the caller's data or configuration is wrong / a service is temporarily unavailable / not permitted.
EXIT_CONFIG = 78
EXIT_DATA = 65
EXIT_UNAVAILABLE = 75
EXIT_PRIVACY = 77


class UmbelError(Exception):
    """Base of all errors Umbel raises on purpose; `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(UmbelError):
    """A setting is unknown, of the wrong type, out of range or contradicts another one."""

    exit_code = EXIT_CONFIG

    def __init__(
        self, key: str, problem: str, *, got: Any = None, allowed: str = "", remedy: str = ""
    ) -> None:
        self.key, self.problem, self.got, self.allowed, self.remedy = key, problem, got, allowed, remedy
        parts = [f"{key} {problem}"]
        if got is not None:
            parts.append(f"got {got!r}")
        text = ", ".join(parts) + "."
        if allowed:
            text += f" Allowed: {allowed}."
        if remedy:
            text += f" {remedy}"
        super().__init__(text)


class RefusalKind(StrEnum):
    """Why a site did not return an update. The value is what travels in the reply."""

    OOM = "oom"
    NO_DATA = "no_data"
    REFUSED = "refused"
    NON_FINITE = "non_finite"
    DEADLINE = "deadline"
    EXCEPTION = "exception"
    POLICY = "policy"
    GAP = "gap"


class Refusal(UmbelError):
    """A site's typed answer in place of an update.

    `reason` is one line and never holds training data: it leaves the institution.
    """

    def __init__(self, kind: RefusalKind, reason: str) -> None:
        self.kind = RefusalKind(kind)
        self.reason = " ".join(reason.split())[:400]
        super().__init__(f"{self.kind}: {self.reason}")


class DataError(UmbelError):
    """A data file cannot be read, is empty or fits no known row format."""

    exit_code = EXIT_DATA


class ModelError(UmbelError):
    """A model, tokenizer or adapter cannot be loaded or does not fit the run."""

    exit_code = EXIT_CONFIG
