"""Driving Flower: a SuperLink of our own for a simulation, `flwr run`, `flwr ls`, `flwr stop`.

A simulation gets a SuperLink on a free port with a Flower home of its own and ends it afterwards, by pid. Nothing
is left running, no other SuperLink is joined by mistake, and runtime dependency installation is off from the
start (Flower would otherwise build an environment for every run).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from umbel.errors import EXIT_UNAVAILABLE, UmbelError

START_TIMEOUT_SECONDS = 60.0
CONNECTION = "umbel-simulation"


class FlowerError(UmbelError):
    """Flower could not be started or refused the run."""

    exit_code = EXIT_UNAVAILABLE


def flower_env(home: Path | None = None) -> dict[str, str]:
    """Return the environment for Flower's processes: our interpreter's tools first, no telemetry, no downloads."""
    env = dict(os.environ)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    env.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    env.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    env.setdefault("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")
    env.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    if home is not None:
        env["FLWR_HOME"] = str(home)
    return env


def tool(name: str) -> str:
    """Return the path of one of Flower's commands; the one beside our interpreter comes first."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise FlowerError(
            f"the command {name!r} was not found. Install Umbel into this environment: pip install -e ."
        )
    return found


def free_port() -> int:
    """Return a TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LocalSuperLink:
    """A SuperLink in simulation mode for the length of a `with` block; its log goes to `log_file`."""

    def __init__(self, home: Path, log_file: Path) -> None:
        self.home, self.log_file, self.port = home, log_file, free_port()
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> LocalSuperLink:
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n',
            "utf-8",
        )
        command = [tool("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
        ]
        log = open(self.log_file, "ab")
        self.process = subprocess.Popen(
            command, env=flower_env(self.home), stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        self._wait()
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if not self.alive():
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.2)
        tail = self.log_file.read_text("utf-8", "replace")[-800:]
        self.stop()
        raise FlowerError(f"the local SuperLink did not start. Its log, {self.log_file}, ends with:\n{tail}")

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End the process and those it started, politely first."""
        if self.process is None:
            return
        for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            if not group_alive(self.process.pid):
                break
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + patience
            while group_alive(self.process.pid) and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.1)
        self.process.poll()

    def __exit__(self, *args: object) -> None:
        self.stop()


def group_alive(group: int) -> bool:
    """Return whether any process of a process group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def start_run(
    app: Path, connection: str, config_file: Path, *, env: dict[str, str], federation_config: str = ""
) -> str:
    """Submit the app and return Flower's run id; raises FlowerError with Flower's own words."""
    command = [
        tool("flwr"),
        "run",
        str(app),
        connection,
        "--run-config",
        str(config_file),
        "--format",
        "json",
    ]
    if federation_config:
        command += ["--federation-config", federation_config]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    answer = last_json(done.stdout)
    if not answer.get("success") or not answer.get("run-id"):
        words = str(answer.get("error-message") or done.stderr or done.stdout).strip()
        raise FlowerError(f"`flwr run` did not start the run: {words[-800:]}")
    return str(answer["run-id"])


def run_facts(run_id: str, connection: str, *, env: dict[str, str]) -> dict[str, Any]:
    """Return Flower's record of a run (`status`, `network-traffic`, ...), or {} when it cannot be had."""
    command = [tool("flwr"), "ls", connection, "--run-id", run_id, "--format", "json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    runs = last_json(done.stdout).get("runs") or []
    return runs[0] if runs else {}


def stop_run(run_id: str, connection: str, *, env: dict[str, str]) -> None:
    """Ask Flower to stop a run."""
    subprocess.run([tool("flwr"), "stop", run_id, connection], env=env, capture_output=True, check=False)


def run_log(run_id: str, connection: str, *, env: dict[str, str]) -> str:
    """Return Flower's log of a run."""
    command = [tool("flwr"), "log", run_id, connection, "--show"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout


def last_json(text: str) -> dict[str, Any]:
    """Return the JSON object in a command's output; Flower may print notices around it."""
    start = text.find("{")
    while start >= 0:
        try:
            value, _ = json.JSONDecoder().raw_decode(text[start:])
        except json.JSONDecodeError:
            start = text.find("{", start + 1)
            continue
        return value if isinstance(value, dict) else {}
    return {}
