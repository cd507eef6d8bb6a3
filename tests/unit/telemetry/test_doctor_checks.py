from __future__ import annotations

import json
import os

import pytest

from umbel.cli import doctor as command
from umbel.telemetry import machine
from umbel.telemetry.machine import FAIL, PASS, WARN


@pytest.mark.parametrize(
    ("version", "status"), [("3.10.14", FAIL), ("3.11.0", PASS), ("3.13.9", PASS), ("3.14.0", FAIL)]
)
def test_python_is_held_against_the_declared_range(version, status):
    assert machine.check_python(version, ">=3.11,<3.14").status == status


def test_the_declared_requirements_are_those_of_the_project():
    python, declared = machine.requirements()
    assert "<3.14" in python
    assert any(text.startswith("torch") for text in declared)


def test_packages_absent_or_out_of_bounds_fail_with_the_command():
    found = {
        c.name: c
        for c in machine.check_packages(
            [
                "numpy>=2",
                "rich>=99",
                "no-such-package-here>=1",
                "absent; sys_platform == 'none'",
                "x; extra == 'dev'",
            ]
        )
    }
    assert {name: c.status for name, c in found.items()} == {
        "numpy": PASS,
        "rich": FAIL,
        "no-such-package-here": FAIL,
    }
    assert found["rich"].remedy == "Install it: pip install 'rich>=99'"
    assert found["no-such-package-here"].found == "not installed, needs >=1"


def test_an_extra_brings_its_own_requirements():
    names = [c.name for c in machine.check_packages(["flwr[simulation]>=1"])]
    assert names == ["flwr", "ray"]


@pytest.mark.parametrize(
    ("free", "status"), [(0, FAIL), (499_999_999, FAIL), (500_000_000, WARN), (5_000_000_000, PASS)]
)
def test_disk_space(free, status):
    assert machine.check_disk("runs", free).status == status


def test_shared_memory_of_a_container_is_warned_about(tmp_path):
    assert machine.check_shared_memory(tmp_path, 67_108_864).status == WARN
    assert "--shm-size" in machine.check_shared_memory(tmp_path, 67_108_864).remedy
    assert machine.check_shared_memory(tmp_path, 2_000_000_000).status == PASS
    assert machine.check_shared_memory(tmp_path / "absent") == (
        "shared memory",
        PASS,
        "not used on this system",
        "",
    )


def test_a_folder_that_can_be_made_passes_and_is_not_made(tmp_path):
    check = machine.check_writable("runs", tmp_path / "a" / "b")
    assert (check.status, list(tmp_path.iterdir())) == (PASS, [])
    assert machine.check_writable("runs", tmp_path).status == PASS


def test_a_folder_under_a_file_fails_with_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    check = machine.check_writable("state", tmp_path / "file" / "b")
    assert check.status == FAIL
    assert "UMBEL_STATE" in check.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission_fails(tmp_path):
    (tmp_path / "shut").mkdir(mode=0o500)
    assert machine.check_writable("cache", tmp_path / "shut" / "x").status == FAIL


def test_a_proxy_is_named_and_never_shown():
    environ = {"https_proxy": "http://user:hunter2@proxy:3128"}
    check = machine.check_proxies(environ)
    assert check.status == WARN
    assert "HTTPS_PROXY set, " in check.found
    assert "hunter2" not in str(check)
    assert machine.check_proxies(environ | {"NO_PROXY": "localhost,127.0.0.1"}).status == PASS
    assert machine.check_proxies({}).status == PASS


def test_runtime_installation_off_is_exactly_one():
    name = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"
    assert machine.check_runtime_installs({name: "1"}).status == PASS
    assert machine.check_runtime_installs({name: "true"}).status == WARN
    assert machine.check_runtime_installs({}).status == WARN


def test_the_flower_command_is_needed():
    assert machine.check_flower_cli(None).status == FAIL
    assert machine.check_flower_cli("/usr/bin/flwr").status == PASS


def test_every_finding_that_is_not_a_pass_has_a_remedy_and_nothing_is_left_behind(tmp_path, monkeypatch):
    for name in ("RUNS", "STATE", "CACHE"):
        monkeypatch.setenv(f"UMBEL_{name}", str(tmp_path / name.lower()))
    checks = list(machine.machine_checks())
    assert [c.name for c in checks if c.status != PASS and not c.remedy] == []
    assert {"python", "torch", "device", "flwr command", "runs folder", "state disk", "proxy"} <= {
        c.name for c in checks
    }
    assert list(tmp_path.iterdir()) == []


def recipe(tmp_path, model="builtin:tiny-llama", data="demo:"):
    path = tmp_path / "recipe.toml"
    path.write_text(f"[model]\nname = {json.dumps(model)}\n[data]\nsource = {json.dumps(data)}\n")
    return path


def statuses(path):
    return {c.name: c.status for c in command.recipe_checks(path)}


def test_a_recipe_is_checked_with_its_model_and_data(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a?", "answer": "b"}\n')
    good = {"recipe": PASS, "model": PASS, "data.source": PASS}
    assert statuses(recipe(tmp_path, data=str(rows))) == good
    assert statuses(recipe(tmp_path, model="builtin:absent")) == good | {"model": FAIL}
    assert statuses(recipe(tmp_path, model=str(tmp_path / "none"))) == good | {"model": FAIL}
    assert statuses(recipe(tmp_path, model="nobody/not-in-the-cache")) == good | {"model": WARN}
    assert statuses(recipe(tmp_path, data=str(tmp_path / "none.jsonl"))) == good | {"data.source": FAIL}
    assert statuses(tmp_path / "absent.toml") == {"recipe": FAIL}


def test_a_wrong_key_is_named_with_the_nearest(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[run]\nround = 3\n")
    (check,) = command.recipe_checks(path)
    assert check.status == FAIL
    assert "run.rounds" in check.found


def test_the_exit_code_follows_the_findings_in_both_forms(tmp_path, monkeypatch, capsys):
    for status, code in ((PASS, 0), (WARN, 0), (FAIL, 1)):
        monkeypatch.setattr(
            command, "machine_checks", lambda s=status: [machine.Check("x", s, "found", "do this")]
        )
        assert command.doctor() == code
        text = capsys.readouterr().out
        assert text.startswith(f"{status}  x")
        assert ("-> do this" in text) == (status != PASS)
        assert command.doctor(json=True) == code
        assert json.loads(capsys.readouterr().out) == {
            "ok": code == 0,
            "checks": [{"name": "x", "status": status, "found": "found", "remedy": "do this"}],
        }
