"""Workers run from a copy of the packages, as they do from a bundle: an edit elsewhere is not a new version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.resident_site import Desk

from umbel.cli.bundle import make_bundle
from umbel.errors import UmbelError


@pytest.fixture(scope="session")
def code(tmp_path_factory) -> Path:
    """A folder with the packages of a bundle."""
    return make_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def desk(tmp_path, code, monkeypatch) -> Iterator[Callable[..., Desk]]:
    """Make desks whose workers are ended with the test."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    desks: list[Desk] = []

    def make(folder: Path = tmp_path, **fields: Any) -> Desk:
        desks.append(Desk(folder, root=fields.pop("root", code), **fields))
        return desks[-1]

    yield make
    for one in desks:
        # A desk of settings that are refused has no worker.
        with suppress(UmbelError):
            one.close()
