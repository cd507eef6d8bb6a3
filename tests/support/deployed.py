"""The shipped files of `deploy/`, run on loopback: unit files, settings and certificates in a folder of the test.

    with Deployment(tmp_path) as d:          # certificates made, SuperLink and SuperExec started from their units
        d.site("st-mary", 'data="demo:clinic"')
        d.register("st-mary")
        d.start_unit("flower-supernode@.service", "st-mary")

Paths of a real machine (/etc/umbel, /var/lib/umbel, /opt/umbel/bin) become folders of the test; nothing else of a
command line or of a settings file is changed but names and ports.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.federation import CONNECTION, Federation
from umbel.cli.flower import free_port, last_json, tool
from umbel.doctor.settings import read_settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CERTS = DEPLOY / "certs" / "certs.py"
_VARIABLE = re.compile(r"\$\{([A-Z_]+)\}")


def unit_lines(path: Path) -> dict[str, list[str]]:
    """Return the entries of a unit file, in order, by name."""
    found: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").replace("\\\n", " ").splitlines():
        if "=" in line and not line.startswith(("#", ";", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name.strip(), []).append(value.strip())
    return found


class Deployment(Federation):
    """Server and sites under the secure profile, from the files that are shipped."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {})
        self.etc, self.var = folder / "etc", folder / "var"
        for path in (self.etc / "sites", self.var):
            path.mkdir(parents=True)
        self.certs = self.etc / "certs"
        self.node_ids: dict[str, str] = {}

    def placed(self, text: str) -> str:
        """Return a text with the paths of a real machine moved into the test's folder."""
        text = text.replace("/etc/umbel", str(self.etc)).replace("/var/lib/umbel", str(self.var))
        return text.replace("/opt/umbel/bin", str(Path(sys.executable).parent))

    def make(self, *arguments: str, folder: Path | None = None) -> None:
        """Run certs.py COMMAND FOLDER ..."""
        command, *rest = arguments
        whole = [sys.executable, str(CERTS), command, str(folder or self.certs), *rest]
        subprocess.run(whole, check=True, timeout=60)

    def settings(self, profile: str, file: Path, **changes: str) -> Path:
        """Write a shipped settings file with some values changed."""
        text = self.placed((DEPLOY / "profiles" / profile).read_text("utf-8"))
        for name, value in changes.items():
            text, number = re.subn(rf"(?m)^{name}=.*$", lambda _, v=value, n=name: f"{n}={v}", text)
            assert number == 1, f"{profile} has no {name}"
        file.write_text(text, "utf-8")
        return file

    def command(
        self, unit: str, instance: str = "", entry: str = "ExecStart"
    ) -> tuple[list[str], dict[str, str]]:
        """Return (arguments, environment) as systemd would make them: ${NAME} is one argument, whatever it holds."""
        lines = unit_lines(DEPLOY / "systemd" / unit)
        (text,), (env_file,) = lines[entry], lines["EnvironmentFile"]
        values = read_settings(Path(self.placed(env_file).replace("%i", instance)))
        arguments = shlex.split(self.placed(text).replace("%i", instance))
        return [_VARIABLE.sub(lambda m: values[m[1]], word) for word in arguments], values

    def start_unit(self, unit: str, instance: str = "", *, name: str = "") -> subprocess.Popen:
        """Run what comes before the start, which must succeed, and then the service."""
        if "ExecStartPre" in unit_lines(DEPLOY / "systemd" / unit):
            before, values = self.command(unit, instance, "ExecStartPre")
            subprocess.run(before, env={**self.env, **values}, check=True, timeout=60)
        command, values = self.command(unit, instance)
        (self.var / instance).mkdir(exist_ok=True)
        return self.spawn(name or instance or unit.split(".")[0], command, **values)

    def __enter__(self) -> Deployment:
        self.make("ca")
        self.make("server", "--host", "localhost")
        self.make("secret")
        ours = {"UMBEL_PORT": str(self.port), "UMBEL_RUNTIME": f"127.0.0.1:{self.port}"}
        self.settings("secure-server.env", self.etc / "server.env", **ours)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.certs / "ca.crt"}"\n'
        )
        self.start_unit("flower-superlink.service")
        self.start_unit("flower-superexec.service")
        self.until_up(self.port)
        return self

    def until_up(self, port: int, *, seconds: float = 60.0, ca: Path | None = None) -> None:
        """Wait until a SuperLink answers."""
        import httpx

        trust: Any = ssl.create_default_context(cafile=str(ca or self.certs / "ca.crt"))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"https://127.0.0.1:{port}/health", verify=trust).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"no SuperLink on {port}: {self.log('flower-superlink')}")

    def site(self, name: str, node_config: str, *, port: int = 0, key: str = "", **changes: str) -> Path:
        """Make a site's key (unless `key` names another site's) and settings; return the settings file."""
        if not key:
            self.make("site", name)
        state = self.var / name / "state"
        facts = f'name="{name}" state-dir="{state}" {node_config}'
        return self.settings(
            "secure-site.env",
            self.etc / "sites" / f"{name}.env",
            UMBEL_SUPERLINK=f"127.0.0.1:{port or self.port}",
            UMBEL_SITE_KEY=str(self.certs / "sites" / f"{key or name}.key"),
            UMBEL_SITE_PORT=str(free_port()),
            UMBEL_NODE_CONFIG=f"'{facts}'",
            **changes,
        )

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run one of Flower's commands and return its JSON."""
        whole = [tool("flwr"), *arguments, "--format", "json"]
        done = subprocess.run(
            whole, env=self.env, cwd=self.folder, capture_output=True, text=True, check=False, timeout=60
        )
        return last_json(done.stdout)

    def register(self, name: str) -> str:
        """Put a site's key on the list and return the id of its node."""
        answer = self.flwr("supernode", "register", str(self.certs / "sites" / f"{name}.pub"), CONNECTION)
        self.node_ids[name] = str(answer["node-id"])
        return self.node_ids[name]

    def online(self) -> set[str]:
        """Return the ids of the nodes that are online."""
        nodes = self.flwr("supernode", "list", CONNECTION).get("nodes", [])
        return {str(n["node-id"]) for n in nodes if n.get("status") == "online"}

    def until_online(self, *names: str, seconds: float = 60.0) -> None:
        """Wait until these sites are online."""
        wanted = {self.node_ids[name] for name in names}
        deadline = time.monotonic() + seconds
        while not wanted <= self.online():
            logs = "\n".join(self.log(name) for name in names)
            assert time.monotonic() < deadline, f"{names} are not online\n{logs}"
            time.sleep(0.5)

    def doctor(self, *arguments: str, **env: str) -> tuple[int, dict[str, dict[str, str]]]:
        """Run `umbel doctor --json` and return (exit code, findings by name)."""
        done = subprocess.run(
            [tool("umbel"), "doctor", "--json", *arguments],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.stdout.startswith("{"), done.stderr
        return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def settled(path: Path) -> list[dict[str, Any]]:
    """Return the records of all .jsonl files below a folder."""
    files = [p for p in path.rglob("*.jsonl") if p.is_file()]
    return [json.loads(line) for p in files for line in p.read_text("utf-8").splitlines()]


def as_root() -> bool:
    """Return whether this process may do what root may."""
    return hasattr(os, "geteuid") and os.geteuid() == 0
