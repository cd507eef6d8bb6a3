"""Long scenarios run only when asked for: `make chaos` sets UMBEL_NIGHTLY=1."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("UMBEL_NIGHTLY") == "1":
        return
    skip = pytest.mark.skip(reason="nightly scenario: make chaos, or UMBEL_NIGHTLY=1")
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(skip)
