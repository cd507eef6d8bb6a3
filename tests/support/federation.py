"""A real federation on loopback: SuperLink, SuperNodes and `flwr` as processes, each run with its own Flower home.

    with Federation(tmp_path, {"clinic": "demo:clinic", ...}) as f:
        run_id = f.start("run.rounds=2", ...)
        status = f.wait(run_id, seconds=120)

Ports are free ones, processes are ended by pid (their whole process group), logs stay under `tmp_path/logs`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from umbel.cli.bundle import make_bundle
from umbel.cli.flower import flower_env, free_port, group_alive, run_facts, start_run, stop_run, tool
from umbel.config import resolve, to_toml
from umbel.telemetry.events import read_events

CONNECTION = "loopback"


class Federation:
    """SuperLink and one SuperNode for each named site; `sites` maps a name to its data source."""

    def __init__(
        self,
        folder: Path,
        sites: dict[str, str],
        *,
        superlink_args: tuple[str, ...] = (),
        isolated: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        """`isolated` runs the SuperLink with a database and the ServerApp under a SuperExec of its own."""
        self.folder, self.sites, self._extra, self.isolated = folder, sites, superlink_args, isolated
        # Sites reach the SuperLink here; a test that puts a proxy in between sets another port.
        self.site_ports: dict[str, int] = {}
        self.port = free_port()
        self.home, self.logs, self.state = folder / "flwr", folder / "logs", folder / "state"
        for path in (self.home, self.logs, self.state):
            path.mkdir(parents=True, exist_ok=True)
        self.env = flower_env(self.home)
        self.env["HF_HUB_OFFLINE"] = "1"
        self.env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.05"
        self.env["OMP_NUM_THREADS"] = "1"
        self.env.update(env or {})
        self.processes: dict[str, subprocess.Popen] = {}
        self.app = make_bundle(folder / "umbel")

    def __enter__(self) -> Federation:
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.start_superlink()
        if self.isolated:
            self.start_superexec()
        for name in self.sites:
            self.start_site(name)
        return self

    def __exit__(self, *args: object) -> None:
        for name in list(self.processes):
            self.kill(name, signal.SIGTERM)
        for name in list(self.processes):
            self.kill(name, signal.SIGKILL)

    def spawn(self, name: str, command: list[str], **env: str) -> subprocess.Popen:
        """Start a process in a group of its own; its output goes to logs/<name>.log."""
        with open(self.logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                env={**self.env, **env},
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers."""
        command = [tool("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation", *self._extra]
        if self.isolated:
            command += ["--isolation", "process", "--database", str(self.folder / "superlink.db")]
        self.spawn("superlink", command)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the SuperLink did not start: {self.log('superlink')}")

    def start_superexec(self) -> None:
        """Start the process that starts ServerApps, apart from the SuperLink."""
        command = [tool("flower-superexec"), "--insecure", "--runtime-api-address", f"127.0.0.1:{self.port}"]
        self.spawn("superexec", command)

    def start_site(self, name: str, **node_config: str) -> None:
        """Start the SuperNode of one site; `node_config` overrides what it is told."""
        facts = {
            "name": name,
            "data": self.sites.get(name, ""),
            "state-dir": str(self.state / name),
            **node_config,
        }
        text = " ".join(f'{key}="{value}"' for key, value in facts.items() if value)
        command = [tool("flower-supernode"), "--insecure", "--superlink"]
        command += [f"127.0.0.1:{self.site_ports.get(name, self.port)}"]
        command += ["--port", str(free_port()), "--node-config", text]
        self.spawn(name, command)

    def kill(self, name: str, sign: int = signal.SIGKILL, *, patience: float = 15.0) -> None:
        """Send a signal to a process and all it started, and wait until they are gone."""
        process = self.processes.get(name)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        if sign in (signal.SIGKILL, signal.SIGTERM):
            deadline = time.monotonic() + patience
            while group_alive(process.pid) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.1)
            process.poll()
            if not group_alive(process.pid):
                del self.processes[name]

    def start(self, *overrides: str) -> str:
        """Submit a run and return Flower's id.

        Follow-ups are off unless asked for: they save an idle SuperNode its pause and cost one process a message, and
        here all sites share two cores.
        """
        config_file = self.folder / "run.toml"
        config_file.write_text(to_toml(resolve(None, ["clients.follow-up=false", *overrides])))
        return start_run(self.app, CONNECTION, config_file, env=self.env)

    def facts(self, run_id: str) -> dict[str, Any]:
        """Return Flower's record of a run."""
        return run_facts(run_id, CONNECTION, env=self.env)

    def stop(self, run_id: str) -> None:
        """Ask Flower to stop a run."""
        stop_run(run_id, CONNECTION, env=self.env)

    def wait(self, run_id: str, *, seconds: float) -> str:
        """Wait until a run has finished and return its status; fails the test after `seconds`."""
        deadline = time.monotonic() + seconds
        # Asking Flower costs seconds of a core: only when the run's own last event is there, or now and then.
        asked = time.monotonic()
        while time.monotonic() < deadline:
            if time.monotonic() - asked >= (2.0 if self._ended() else 20.0):
                status = str(self.facts(run_id).get("status", ""))
                if status.startswith("finished"):
                    return status
                asked = time.monotonic()
            time.sleep(0.3)
        raise AssertionError(f"the run did not finish in {seconds} s\n{self.log('superlink')}")

    def events(self, run: str = "run") -> list[dict[str, Any]]:
        """Return the events of the run folder `run` so far."""
        return read_events(self.folder / run / "events.jsonl")

    def until(
        self, wanted: Callable[[dict[str, Any]], bool], *, seconds: float, run: str = "run"
    ) -> dict[str, Any]:
        """Wait for an event and return it; fails the test after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event in self.events(run):
                if wanted(event):
                    return event
            time.sleep(0.2)
        names = [e["event"] for e in self.events(run)][-12:]
        raise AssertionError(
            f"the event did not come in {seconds} s; the last ones are {names}\n{self.log('superlink')}"
        )

    def _ended(self) -> bool:
        """Whether the newest run folder's last event is the last one of a run."""
        found = sorted(self.folder.glob("*/events.jsonl"), key=lambda p: p.stat().st_mtime)
        return bool(found) and '"run_finished"' in found[-1].read_text("utf-8", "replace")[-2000:]

    def log(self, name: str) -> str:
        """Return the end of a process's log."""
        path = self.logs / f"{name}.log"
        return path.read_text("utf-8", "replace")[-4000:] if path.exists() else ""
