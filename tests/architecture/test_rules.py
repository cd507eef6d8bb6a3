"""Rules of the house that a linter does not know."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("umbel", "compression", "strategies", "server_app", "client_app")
SOURCES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# The only places that may know Flower.
FLOWER_ALLOWED = (
    "server_app/",
    "client_app/app.py",
    "client_app/resident/probe.py",
    "client_app/resident/site.py",
    "strategies/base.py",
    "compression/flower.py",
    "umbel/messages.py",
)
HEAVY = {"torch", "transformers", "peft", "datasets", "ray", "numba"}
# Modules that cannot exist without torch may import it at their top.
TORCH_MODULES = ("umbel/models/", "client_app/tasks/", "compression/kernels/")


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    nodes = tree.body if top_level else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_flower_is_known_only_where_messages_are_made() -> None:
    knowing = [
        str(p.relative_to(ROOT)) for p in SOURCES if any(m.split(".")[0] == "flwr" for m in imports(p))
    ]
    assert [p for p in knowing if not p.startswith(FLOWER_ALLOWED)] == []


def test_heavy_libraries_are_not_imported_by_importing_us() -> None:
    top = {
        str(p.relative_to(ROOT)): sorted(HEAVY & {m.split(".")[0] for m in imports(p, top_level=True)})
        for p in SOURCES
    }
    assert {p: m for p, m in top.items() if m and not p.startswith(TORCH_MODULES)} == {}


def test_the_command_line_and_the_apps_start_without_torch() -> None:
    code = (
        "import sys, umbel.cli.main, umbel.cli.launch, client_app.app, server_app.app; "
        "print(sorted(m for m in ('torch', 'transformers', 'peft', 'datasets') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_nothing_is_ever_unpickled() -> None:
    banned = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    for path in SOURCES:
        assert not banned & {m.split(".")[0] for m in imports(path)}, path
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = getattr(node.func.value, "id", "")
                assert (owner, node.func.attr) not in {
                    ("torch", "load"),
                    ("np", "load"),
                    ("numpy", "load"),
                }, path


def test_python_3_14_is_excluded_because_its_library_has_a_package_called_compression() -> None:
    assert PYPROJECT["project"]["requires-python"] == ">=3.11,<3.14"


def test_every_setting_is_declared_to_flower_with_its_default() -> None:
    from umbel.config import Config, to_flat
    from umbel.config.load import flatten

    assert flatten(PYPROJECT["tool"]["flwr"]["app"]["config"]) == to_flat(Config())


def test_every_dependency_has_both_bounds_and_a_tested_version() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in PYPROJECT["project"]["dependencies"]:
        name = requirement.split("[")[0].split(">")[0].strip().lower().replace("_", "-")
        assert ">=" in requirement, requirement
        assert "<" in requirement, requirement
        assert name in pinned, name


def test_d12_every_module_imports_on_the_pinned_versions() -> None:
    """D12: one process imports everything we ship."""
    names = [
        str(p.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__") for p in SOURCES
    ]
    code = "import importlib, sys\nfor n in sys.argv[1:]:\n    importlib.import_module(n)\nprint(len(sys.argv) - 1)"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) == len(SOURCES)


@pytest.fixture(scope="module", params=["checkout", "generated"])
def fab(request, tmp_path_factory) -> set[str]:
    """Names in the bundle that Flower builds from the checkout, and from what `umbel run` submits."""
    import shutil

    from umbel.cli.bundle import make_bundle
    from umbel.cli.flower import flower_env, tool

    # A checkout's folder name may hold an underscore, which Flower refuses; the copy has a plain one.
    folder = tmp_path_factory.mktemp(request.param) / "umbel"
    if request.param == "generated":
        make_bundle(folder)
    else:
        tracked = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in tracked.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
    done = subprocess.run(
        [tool("flwr"), "build"],
        cwd=folder,
        env=flower_env(folder.parent),
        capture_output=True,
        text=True,
        check=False,
    )
    bundles = list(folder.glob("*.fab"))
    assert len(bundles) == 1, done.stdout + done.stderr
    assert bundles[0].stat().st_size < 10 * 2**20
    with zipfile.ZipFile(bundles[0]) as archive:
        return set(archive.namelist())


def test_the_bundle_holds_all_that_runs_and_nothing_else(fab) -> None:
    wanted = {str(p.relative_to(ROOT)) for p in SOURCES}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "umbel/data/demo").glob("*.jsonl")}
    assert wanted <= fab, sorted(wanted - fab)[:5]
    assert "LICENSE" in fab
    strangers = [
        n for n in fab if n.split("/")[0] in ("tests", "benchmarks", "docs", "deploy", "runs", ".venv", ".ci")
    ]
    assert strangers == []
