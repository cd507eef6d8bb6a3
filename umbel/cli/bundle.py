"""The app as a folder that `flwr run` takes, made from the installed packages.

Flower bundles what lies beside a `pyproject.toml`. A checkout also holds run folders, notes and test data that
must not travel, and an installation from a wheel has no `pyproject.toml` at all; so the folder is always made
afresh: the five packages, a licence and a generated `pyproject.toml`.
"""

from __future__ import annotations

import importlib.util
import shutil
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from umbel import __version__
from umbel.config.declare import block

PACKAGES = ("umbel", "compression", "strategies", "server_app", "client_app")

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "umbel"
version = "{version}"
description = "Federated training and fine-tuning of language models."
license = {{ file = "LICENSE" }}
requires-python = ">=3.11,<3.14"
dependencies = [
{dependencies}
]

[tool.uv]
default-groups = []

[tool.flwr.app]
publisher = "umbel"
fab-format-version = 1
flwr-version-target = "1.42.0"

[tool.flwr.app.components]
serverapp = "server_app.app:app"
clientapp = "client_app.app:app"

"""


def package_folder(name: str) -> Path:
    """Return the folder of an importable package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {name!r} is not installed; install Umbel again")
    return Path(next(iter(spec.submodule_search_locations)))


def dependencies() -> list[str]:
    """Return the requirements of the installed distribution, without extras."""
    try:
        found = requires("umbel") or []
    except PackageNotFoundError:
        found = []
    plain = [r for r in found if "extra ==" not in r]
    return plain or ["flwr[simulation]>=1.42.0,<1.43"]


def make_bundle(target: Path) -> Path:
    """Write the app's folder to `target` (created) and return it."""
    target.mkdir(parents=True, exist_ok=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in PACKAGES:
        shutil.copytree(package_folder(name), target / name, ignore=ignore, dirs_exist_ok=True)
    licence = package_folder("umbel").parent / "LICENSE"
    (target / "LICENSE").write_text(
        licence.read_text("utf-8") if licence.is_file() else "Apache License, Version 2.0\n", "utf-8"
    )
    lines = "\n".join(f"    {text!r}," for text in dependencies())
    text = _PYPROJECT.format(version=__version__, dependencies=lines.replace("'", '"')) + block()
    (target / "pyproject.toml").write_text(text, "utf-8")
    return target
