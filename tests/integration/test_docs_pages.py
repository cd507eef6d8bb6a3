"""The documentation is current, complete in itself, and what it says can be run is run or understood by its tool.

H40: every command in README and docs. Cheap ones run here against a prepared run folder and state folder; `umbel run`
commands are resolved with --dry-run; flags of Flower's commands are compared with their --help.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import full_run

from umbel.cli.flower import flower_env, tool
from umbel.config.reference import reference
from umbel.policy import parse_policy
from umbel.telemetry.gauges import GPU, SERVER, SITE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
# Commands that need what a test has not: a GPU farm, a listening port for ever, minutes, another machine's files.
NOT_RUN = ("umbel site start", "umbel site metrics", "umbel watch", "umbel compare")


def blocks(path: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of every line in a shell block."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+#.*$", "", line).strip()
                if line:
                    found.append((page.name, line))
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A working folder with the recipes, a run named `demo`, and a site's state folder."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    run = folder / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in full_run(rounds=3)))
    return folder


@pytest.fixture
def umbel(home, monkeypatch, capfd):
    """Return a function that runs one `umbel` command in this process and returns (exit code, what it printed)."""
    from umbel.cli.main import main

    for name, value in flower_env(home / "flwr").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UMBEL_RUNS", str(home / "runs"))
    monkeypatch.setenv("UMBEL_STATE", str(home / "state"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(home)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["umbel", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out + err

    return run


def test_the_configuration_reference_is_current() -> None:
    """`python -m umbel.config.reference docs/configuration.md` after a change of the schema."""
    assert (DOCS / "configuration.md").read_text("utf-8") == reference()


def test_the_metrics_on_the_page_are_those_exported() -> None:
    named = re.findall(r"^\| `(umbel_\w+)`", (DOCS / "monitoring.md").read_text(), re.MULTILINE)
    assert sorted(set(named)) == sorted({**SERVER, **SITE, **GPU})


def test_links_between_pages_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (DOCS / target).exists(), (page.name, target)


def test_every_page_is_in_the_contents() -> None:
    import yaml

    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = [next(iter(entry.values())) for entry in entries]
    assert sorted(named) == sorted(p.name for p in DOCS.glob("*.md"))


def test_the_site_is_built_without_a_network_and_loads_nothing_from_elsewhere(tmp_path) -> None:
    pytest.importorskip("mkdocs")
    env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    pages = list((tmp_path / "site").glob("*.html"))
    assert len(pages) >= 13
    for page in pages:
        loaded = re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(https?://[^\"'> ]+)", page.read_text()
        )
        # A canonical address is a name, not a request.
        assert loaded == [], page.name
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:", sheet.read_text()), sheet


def test_the_policy_on_the_page_is_one() -> None:
    (text,) = blocks(DOCS / "policy.md", "toml")
    import tomllib

    policy = parse_policy(tomllib.loads(text))
    assert policy.run.min_sites == 3
    assert {b.key for b in policy.require} == {"train.clip-norm", "privacy.noise-multiplier"}


@pytest.mark.parametrize("name", ["root_mean.py", "test_root_mean.py"])
def test_the_worked_example_is_what_the_page_shows(name) -> None:
    code = (DOCS / "examples" / name).read_text()
    assert code in blocks(DOCS / "add-a-method.md", "python")


def test_the_worked_example_passes_its_own_test() -> None:
    env = {**flower_env(), "PYTHONPATH": f"{ROOT / 'tests'}:{DOCS / 'examples'}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(DOCS / "examples")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout[-2000:]


@pytest.mark.parametrize("command", ["flower-superlink", "flower-supernode"])
def test_h40_flags_of_flower_in_the_docs_are_known(command, tmp_path) -> None:
    lines = [line for _, line in commands() if line.startswith(command)]
    lines += [
        line
        for _, line in commands()
        if command == "flower-supernode" and line.startswith("umbel site start")
    ]
    flags = set(re.findall(r"--[a-z][a-z-]+", " ".join(lines)))
    assert flags
    help_text = subprocess.run(
        [tool(command), "--help"], env=flower_env(tmp_path), capture_output=True, text=True, check=True
    ).stdout
    assert {f for f in flags if f not in help_text} == set()


def runnable() -> list[str]:
    """Every distinct `umbel` command that a test can run."""
    lines = dict.fromkeys(re.sub(r"^\.venv/bin/", "", line) for _, line in commands())
    found = [line for line in lines if line.startswith("umbel ") and not line.startswith(NOT_RUN)]
    # What needs a started SuperLink or a real run is covered by the federation tests.
    return [line for line in found if "--federation" not in line and "--leave-one-out" not in line]


@pytest.mark.parametrize("line", runnable())
def test_h40_every_umbel_command_of_readme_and_docs_runs(line, home, umbel) -> None:
    words = shlex.split(line)[1:]
    if words[0] == "run":
        words = [w.replace("runs/NAME/config.toml", "recipes/smoke.toml") for w in words]
        words += [] if "--dry-run" in words else ["--dry-run"]
    words = [
        w.replace("/var/lib/umbel", f"{home}/state").replace("/data/rows", f"{home}/recipes") for w in words
    ]
    code, said = umbel(*words)
    allowed = {0}
    if words[0] == "inspect" and "--bundle" not in words and "--audit" not in words:
        allowed = {65}  # nothing has left this site yet
    if words[:2] == ["ledger", "verify"]:
        allowed = {1}  # the prepared run has no ledger
    if words[0] == "doctor" or words[:2] == ["site", "status"]:
        allowed = {0, 1}
    assert code in allowed, f"{line}\n{said[-1600:]}"
    assert "Traceback" not in said


def test_commands_that_are_not_run_exist_at_least(umbel) -> None:
    for line in NOT_RUN:
        words = line.split()[1:]
        # `umbel site start` hands --help on to Flower.
        if words != ["site", "start"]:
            assert umbel(*words, "--help")[0] == 0, line
