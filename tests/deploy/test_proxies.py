"""The shipped nginx and caddy files before a real SuperLink: the Fleet API passes, everything else is not there."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.deployed import DEPLOY, Deployment

from umbel.cli.flower import free_port

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("proxy")) as d:
        d.site("st-mary", 'data="demo:clinic"')
        d.site("stranger", 'data="demo:clinic"')
        d.register("st-mary")
        yield d


def start(d: Deployment, name: str) -> int:
    """Start a proxy from its shipped file, with other ports and folders; return its port."""
    port = free_port()
    text = d.placed(
        (DEPLOY / "proxy" / ("nginx.conf" if name == "nginx" else "Caddyfile")).read_text("utf-8")
    )
    text = text.replace("8443", str(port)).replace("127.0.0.1:8000", f"127.0.0.1:{d.port}")
    file = d.folder / f"{name}-{port}.conf"
    if name == "nginx":
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        scratch = "".join(f"    {kind}_temp_path {d.folder}/{kind};\n" for kind in kinds)
        text = text.replace("/run/nginx.pid", f"{d.folder}/nginx-{port}.pid").replace(
            "http {\n", "http {\n" + scratch
        )
        command = [str(shutil.which("nginx")), "-e", "stderr", "-c", str(file), "-g", "daemon off;"]
    else:
        command = [str(shutil.which("caddy")), "run", "--adapter", "caddyfile", "--config", str(file)]
    file.write_text(text, "utf-8")
    d.spawn(
        f"{name}-{port}",
        command,
        HOME=str(d.folder),
        XDG_DATA_HOME=str(d.folder),
        XDG_CONFIG_HOME=str(d.folder),
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            ask(d, port, "GET", "/")
            return port
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"{name} did not start: {d.log(f'{name}-{port}')}")


def ask(d: Deployment, port: int, verb: str, path: str, content: bytes = b"") -> httpx.Response:
    trust: Any = ssl.create_default_context(cafile=str(d.certs / "ca.crt"))
    headers = {"Content-Type": "application/protobuf"} if content else {}
    return httpx.request(
        verb, f"https://localhost:{port}{path}", content=content, headers=headers, verify=trust, timeout=20
    )


def listed(d: Deployment, port: int, name: str) -> str:
    """Ask through the proxy whether a key is on the list."""
    command = [sys.executable, "-m", "client_app.resident.probe", f"localhost:{port}"]
    command += ["--ca", str(d.certs / "ca.crt"), "--key", str(d.certs / "sites" / f"{name}.key")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.strip()


@pytest.mark.parametrize("name", ["nginx", "caddy"])
def test_only_the_fleet_api_is_seen(server, name) -> None:
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    port = start(server, name)
    assert listed(server, port, "st-mary") == "registered", server.log(f"{name}-{port}")
    assert listed(server, port, "stranger") == "unknown"
    # All of these exist behind it, on loopback.
    assert ask(server, server.port, "GET", "/health").status_code == 200
    for path in (
        "/",
        "/health",
        "/docs",
        "/openapi.json",
        "/v1/control/list-runs",
        "/v1/runtime/acquire-task",
    ):
        for verb in ("GET", "POST"):
            assert ask(server, port, verb, path, b"x" * (verb == "POST")).status_code == 404, path
    # Neither does a path that only looks like Fleet's lead out of it.
    for path in ("/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleetx"):
        assert ask(server, port, "POST", path, b"x").status_code == 404, path
    assert ask(server, port, "POST", "/v1/fleet/push-object", b"x" * (17 << 20)).status_code == 413


@pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")
def test_a_site_comes_online_through_the_proxy(server) -> None:
    port = start(server, "nginx")
    server.site("st-joseph", 'data="demo:clinic"', port=port)
    server.register("st-joseph")
    server.start_unit("flower-supernode@.service", "st-joseph")
    server.until_online("st-joseph")
