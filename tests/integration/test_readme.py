"""H40: what the README and the recipes say can be run, is run or at least understood by the tools it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from umbel.cli.flower import flower_env, tool
from umbel.config import resolve

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("recipe", sorted(p.name for p in (ROOT / "recipes").glob("*.toml")))
def test_h40_every_recipe_resolves_and_says_what_it_is(recipe) -> None:
    text = (ROOT / "recipes" / recipe).read_text()
    assert text.startswith("# ")
    assert resolve(ROOT / "recipes" / recipe).run.rounds >= 1


def test_h40_every_umbel_command_of_the_readme_exists() -> None:
    named = set(re.findall(r"umbel (\w+)", README)) - {"run"} | {"run"}
    done = subprocess.run(
        [sys.executable, "-m", "umbel.cli.main", "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"^\W*(\w+) ", done.stdout, re.MULTILINE))
    assert named <= known, named - known


@pytest.mark.parametrize("command", ["flower-superlink", "flower-supernode"])
def test_h40_every_flower_flag_of_the_readme_is_known_to_the_installed_flower(command, tmp_path) -> None:
    """Flags have moved between Flower's versions; older guides do not start."""
    blocks = re.findall(
        rf"^{command} (.*?)(?:\n\n|```)", README.replace("\\\n", " "), re.MULTILINE | re.DOTALL
    )
    assert blocks
    flags = set(re.findall(r"--[a-z][a-z-]+", " ".join(blocks)))
    help_text = subprocess.run(
        [tool(command), "--help"], env=flower_env(tmp_path), capture_output=True, text=True, check=True
    ).stdout
    assert {f for f in flags if f not in help_text} == set()


def test_h40_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    assert {"demo", "test"} <= targets
    assert targets <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
