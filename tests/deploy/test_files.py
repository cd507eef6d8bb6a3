"""The shipped files: every flag is one that the pinned Flower has, units verify, charts and compose files hold together."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deployed import DEPLOY, unit_lines

from umbel.cli.flower import flower_env, tool
from umbel.doctor.profile import check_profile, check_switches
from umbel.doctor.settings import node_facts, read_settings
from umbel.telemetry.machine import PASS

PROGRAMS = ("flower-superlink", "flower-superexec", "flower-supernode")
DEPRECATED = re.compile(r"deprecated", re.IGNORECASE)
HELM = sorted((DEPLOY / "helm").iterdir())


@functools.cache
def flags(program: str) -> dict[str, bool]:
    """Return flag -> whether the program's own help calls it deprecated."""
    done = subprocess.run(
        [tool(program), "--help"], env=flower_env(), capture_output=True, text=True, check=True, timeout=60
    )
    text = done.stdout[done.stdout.index("options:") :]
    parts = re.split(r"\n {2}(?=-)", text)
    return {
        flag: bool(DEPRECATED.search(part))
        for part in parts
        for flag in re.findall(r"--[a-z][a-z-]+", part.split("  ")[0].split("\n")[0])
    }


def rendered(chart: Path) -> list[dict[str, Any]]:
    """Return a chart's objects; only the few template actions these charts use are understood."""
    values = yaml.safe_load((chart / "values.yaml").read_text("utf-8"))

    def value(path: str) -> Any:
        if path == ".Release.Name":
            return "study"
        found: Any = values
        for name in path.removeprefix(".Values.").split("."):
            found = found[name]
        return found

    def action(match: re.Match[str]) -> str:
        words = match[1].split()
        if words[0] == "toYaml":
            pad = " " * int(words[-1])
            return "\n".join(pad + line for line in yaml.safe_dump(value(words[1])).splitlines())
        text = str(value(words[0]))
        return f'"{text}"' if words[-1] == "quote" else text

    objects = []
    for path in sorted((chart / "templates").glob("*.yaml")):
        text = re.sub(r"\{\{ *(.+?) *\}\}", action, path.read_text("utf-8"))
        objects += [o for o in yaml.safe_load_all(text) if o]
    return objects


def containers(chart: Path) -> list[dict[str, Any]]:
    sets = [o for o in rendered(chart) if o["kind"] == "StatefulSet"]
    return [c for s in sets for c in s["spec"]["template"]["spec"]["containers"]]


def commands() -> dict[str, list[str]]:
    """Return every command of Flower or of `umbel site start` in deploy/, by where it stands."""
    found: dict[str, list[str]] = {}
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        found[path.name] = shlex.split(unit_lines(path)["ExecStart"][0])
    for path in sorted((DEPLOY / "compose").glob("*.yml")):
        for name, service in yaml.safe_load(path.read_text("utf-8"))["services"].items():
            if "command" in service:
                found[f"{path.name}:{name}"] = service["command"]
    for chart in HELM:
        found |= {f"{chart.name}:{c['name']}": c["command"] for c in containers(chart) if "command" in c}
    text = (DEPLOY / "slurm" / "site.sbatch").read_text("utf-8").replace("\\\n", " ")
    line = next(x for x in text.splitlines() if "site start" in x)
    found["site.sbatch"] = shlex.split(line.strip().removesuffix("&"))
    return found


COMMANDS = commands()


def program(words: list[str]) -> str:
    first = Path(words[0]).name
    return "flower-supernode" if first == "umbel" and words[1:3] == ["site", "start"] else first


def test_all_kinds_of_files_bring_their_commands() -> None:
    assert {program(words) for words in COMMANDS.values()} == set(PROGRAMS)
    assert len(COMMANDS) >= 13


@pytest.mark.parametrize("where", COMMANDS)
def test_every_flag_is_known_to_the_pinned_flower_and_not_deprecated(where) -> None:
    words = COMMANDS[where]
    known = flags(program(words))
    used = [w.split("=")[0] for w in words if w.startswith("--")]
    assert used
    assert [f for f in used if f not in known] == []
    assert [f for f in used if known[f]] == []


@pytest.mark.parametrize("gone", ["--clientappio-api-address", "--plugin-type", "--appio-api-address"])
def test_a_flag_of_older_versions_would_be_noticed(gone) -> None:
    assert all(gone not in flags(p) for p in PROGRAMS)
    assert flags("flower-superlink")["--fleet-api-address"] is True


@pytest.mark.parametrize("where", [w for w in COMMANDS if not w.startswith("quickstart")])
def test_commands_of_the_secure_profile_are_secure(where) -> None:
    words = COMMANDS[where]
    needed = {
        "flower-superlink": {
            "--ssl-certfile",
            "--ssl-keyfile",
            "--ssl-ca-certfile",
            "--enable-supernode-auth",
        }
        | {"--superexec-auth-secret-file", "--disable-runtime-dependency-installation", "--database"},
        "flower-superexec": {"--root-certificates", "--superexec-auth-secret-file"},
        "flower-supernode": {"--root-certificates", "--auth-supernode-private-key"},
    }[program(words)]
    assert needed <= set(words)
    assert "--insecure" not in words
    assert "--allow-runtime-dependency-installation" not in words
    if program(words) == "flower-superlink":
        assert words[words.index("--isolation") + 1] == "process"
        assert words[words.index("--host") + 1] in ("127.0.0.1", "${UMBEL_HOST}")


def test_the_open_quick_start_stays_on_loopback_and_publishes_no_port() -> None:
    services = yaml.safe_load((DEPLOY / "compose" / "quickstart.yml").read_text("utf-8"))["services"]
    assert all("ports" not in s for s in services.values())
    assert services["superlink"]["command"][3] == "127.0.0.1"
    assert {s.get("network_mode") for n, s in services.items() if n != "superlink"} == {"service:superlink"}


@pytest.mark.parametrize("file", sorted(p.name for p in (DEPLOY / "profiles").glob("*.env")))
def test_the_shipped_settings_pass_the_doctor(file) -> None:
    profile, role = file.removesuffix(".env").split("-")
    settings = read_settings(DEPLOY / "profiles" / file)
    assert settings["UMBEL_PROFILE"] == profile
    checks = [check_profile(role, settings), *check_switches(settings)]
    assert [c for c in checks if c.status != PASS] == []
    if role == "site":
        assert set(node_facts(settings)) >= {"name", "data"}


def test_every_variable_of_a_unit_is_in_its_settings_file() -> None:
    for file, settings in (
        ("flower-superlink.service", "secure-server.env"),
        ("flower-superexec.service", "secure-server.env"),
        ("flower-supernode@.service", "secure-site.env"),
    ):
        used = set(re.findall(r"\$\{(\w+)\}", unit_lines(DEPLOY / "systemd" / file)["ExecStart"][0]))
        assert used
        assert used <= set(read_settings(DEPLOY / "profiles" / settings))


def test_a_site_is_started_again_for_longer_than_the_refusal_of_its_key() -> None:
    """A server refuses a key for up to 60 s after a crash: 10 s apart and without a limit outlives that."""
    lines = unit_lines(DEPLOY / "systemd" / "flower-supernode@.service")
    assert lines["Restart"] == ["always"]
    assert lines["RestartSec"] == ["10"]
    assert lines["StartLimitIntervalSec"] == ["0"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_units_verify(tmp_path) -> None:
    """Paths of the program become those of this environment: systemd looks whether they can be run."""
    names = []
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        name = path.name.replace("@.", "@st-mary.")
        text = path.read_text("utf-8").replace("/opt/umbel/bin", str(Path(sys.executable).parent))
        (tmp_path / name).write_text(text, "utf-8")
        names.append(str(tmp_path / name))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = [x for x in (done.stdout + done.stderr).splitlines() if str(tmp_path) in x or "flower-" in x]
    assert (done.returncode, said) == (0, []), done.stderr


@pytest.mark.parametrize("chart", HELM, ids=lambda p: p.name)
def test_charts_run_as_nobody_with_probes(chart) -> None:
    pod = next(o for o in rendered(chart) if o["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        mounted = {m["name"] for m in container["volumeMounts"]}
        assert mounted <= {v["name"] for v in pod["volumes"]}
    probed = [c["name"] for c in pod["containers"] if "livenessProbe" in c]
    assert probed == ["superlink" if "server" in chart.name else "supernode"]


def test_the_site_chart_lets_nothing_in_and_only_the_server_out() -> None:
    objects = rendered(DEPLOY / "helm" / "umbel-site")
    policy = next(o for o in objects if o["kind"] == "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == []
    blocks = [to["ipBlock"]["cidr"] for rule in policy["egress"] for to in rule.get("to", [])]
    assert blocks == ["192.0.2.10/32"]
    assert [p["port"] for rule in policy["egress"] for p in rule["ports"]] == [8443, 53, 53]
    assert not [o for o in objects if o["kind"] == "Service"]
    (container,) = containers(DEPLOY / "helm" / "umbel-site")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.skipif(not shutil.which("helm"), reason="helm is not installed")
@pytest.mark.parametrize("chart", HELM, ids=lambda p: p.name)
def test_helm_renders_the_same(chart) -> None:
    done = subprocess.run(
        ["helm", "template", "study", str(chart)], capture_output=True, text=True, check=True, timeout=60
    )
    assert [o for o in yaml.safe_load_all(done.stdout) if o] == rendered(chart)


def test_images_run_as_an_ordinary_user_and_install_nothing_later() -> None:
    text = (DEPLOY / "compose" / "Dockerfile").read_text("utf-8")
    assert text.rindex("\nUSER umbel") > text.rindex("\nRUN ")
    assert "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1" in text
    copied = {
        w for x in text.splitlines() if x.startswith("COPY") and "--from" not in x for w in x.split()[1:-1]
    }
    assert [name for name in copied if not (DEPLOY.parent / name).exists()] == []


@pytest.mark.skipif(not shutil.which("docker"), reason="docker is not installed")
@pytest.mark.parametrize("file", ["quickstart.yml", "server.yml", "site.yml"])
def test_compose_files_are_read_by_compose(file, tmp_path) -> None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker has no compose")
    text = (
        (DEPLOY / "compose" / file)
        .read_text("utf-8")
        .replace("/etc/umbel/server.env", str(tmp_path / "s.env"))
    )
    (tmp_path / "s.env").write_text("UMBEL_PROFILE=secure\n")
    (tmp_path / file).write_text(text)
    done = subprocess.run(
        ["docker", "compose", "-f", str(tmp_path / file), "config", "--quiet"],
        env=flower_env() | {"UMBEL_SUPERLINK": "a:1", "UMBEL_SITE": "b"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", ["slurm/site.sbatch", "terraform/server.sh"])
def test_shell_files_are_shell(file) -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / file)], check=True, timeout=20)


@pytest.mark.skipif(not shutil.which("terraform"), reason="terraform is not installed")
def test_terraform_reads_the_module_and_finds_it_formatted() -> None:
    """`terraform fmt -check` parses the files too; providers, which would have to be fetched, are not needed for it."""
    folder = DEPLOY / "terraform"
    done = subprocess.run(
        ["terraform", "fmt", "-check", "-diff", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_terraform_module_opens_two_ports() -> None:
    ports = re.findall(r"from_port\s*=\s*(\d+)", (DEPLOY / "terraform" / "main.tf").read_text("utf-8"))
    assert sorted(ports) == ["22", "8443"]


def test_the_batch_job_starts_again_and_leaves_politely(tmp_path) -> None:
    """A site that ends is started again; TERM, which Slurm sends a minute before the end, reaches it and ends the job."""
    import signal
    import time

    fake = tmp_path / "bin" / "umbel"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/bash\necho "$@" >> "$LOG"\n[ "$1" = doctor ] && exit 0\n'
        '[ "$(grep -c "site start" "$LOG")" -lt 2 ] && exit 49\n'
        "trap 'echo politely >> \"$LOG\"; exit 0' TERM\nwhile true; do sleep 0.1; done\n"
    )
    fake.chmod(0o755)
    log = tmp_path / "log"
    text = (DEPLOY / "slurm" / "site.sbatch").read_text("utf-8").replace("sleep 10", "sleep 0.2")
    (tmp_path / "job").write_text(text)
    env = flower_env() | {"UMBEL_BIN": str(fake.parent), "LOG": str(log)}
    env["UMBEL_SETTINGS"] = str(DEPLOY / "profiles" / "secure-site.env")
    job = subprocess.Popen(["bash", str(tmp_path / "job")], env=env)
    try:
        deadline = time.monotonic() + 20
        while not log.exists() or log.read_text().count("site start") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.3)
        job.send_signal(signal.SIGTERM)
        assert job.wait(10) == 143
    finally:
        job.kill()
    lines = log.read_text().splitlines()
    assert lines[0].startswith("doctor --role site")
    assert lines[-1] == "politely"
    assert 'name="st-mary" data="/srv/umbel/rows.jsonl"' in lines[1]
