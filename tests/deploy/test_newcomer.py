"""From `git clone` to a finished secure federation of two sites, with the commands of docs/deployment.md alone.

The repository is cloned for real, from the tree this test belongs to. `make install`, which takes minutes, is left out:
the environment of this test (or the one named by $UMBEL_TEST_VENV) is put where it would be.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from umbel.cli.flower import free_port

pytestmark = [pytest.mark.federation, pytest.mark.nightly, pytest.mark.timeout(290)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "deployment.md"


def block(title: str) -> list[str]:
    """Return the commands of the first shell block below a heading of the page."""
    text = PAGE.read_text("utf-8")
    text = text[text.index(f"## {title}\n") :]
    found = re.search(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in found[1].replace("\\\n", " ").splitlines()]
    return [line for line in lines if line]


def published(folder: Path) -> Path:
    """Return a repository with what a commit of this tree would hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    git = [
        "git",
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.org",
        "-c",
        "init.defaultBranch=main",
    ]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *command], cwd=folder, check=True, capture_output=True)
    return folder


def test_the_newcomer_needs_ten_commands_at_most() -> None:
    commands = block("From clone to a secure federation")
    assert commands[0].startswith("git clone ")
    assert len(commands) <= 10


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a git checkout")
def test_the_newcomer_s_commands_end_with_a_finished_secure_run(tmp_path) -> None:
    source = published(tmp_path / "source")
    venv = Path(os.environ.get("UMBEL_TEST_VENV") or sys.prefix)
    study = tmp_path / "study"
    env = {
        **os.environ,
        # The environment has this tree installed: the clone's own code comes first.
        "PYTHONPATH": str(tmp_path / "umbel"),
        "UMBEL_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "UMBEL_RUNS": str(tmp_path / "runs"),
    }
    script = ["set -euo pipefail"]
    for command in block("From clone to a secure federation"):
        if command.startswith("git clone "):
            command = f"git clone --quiet {source} umbel"
        elif command == "make install":
            command = f"ln -s {venv} .venv"
        script.append(command.replace("/tmp/study", str(study)))
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=270,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "finished:completed" in done.stdout
    events = [json.loads(x) for x in (study / "run" / "events.jsonl").read_text().splitlines()]
    commits = [e for e in events if e["event"] == "round_committed"]
    assert len(commits) == 3
    assert all([a["site"] for a in c["accepted"]] == ["clinic", "kitchen"] for c in commits)
    assert (study / "run" / "report.html").is_file()
