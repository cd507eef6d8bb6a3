"""Two network namespaces: the site's drops everything that is not an answer, and the run completes.

The test makes the namespaces and runs itself again inside the server's; only the site's process is put into the other.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deployed import Deployment, as_root

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(280)]

INSIDE = "UMBEL_TEST_SITE_NETNS"
SERVER, SITE = "10.231.7.1", "10.231.7.2"
FIREWALL = """
table inet site {
    chain input {
        type filter hook input priority 0; policy drop;
        iifname "lo" accept
        ct state established,related accept
    }
}
"""
SETTINGS = [
    "run.rounds=1",
    "clients.minimum=1",
    "clients.deadline-seconds=90",
    "clients.grace-seconds=5",
    "train.local-steps=1",
    "train.batch-size=2",
    "train.threads=1",
    "data.max-length=64",
    "data.limit=8",
    "eval.final=false",
    "telemetry.report=false",
]


def run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """(server's, site's), joined by one cable; skipped where they cannot be made."""
    if not as_root():
        pytest.skip("network namespaces need root")
    for program in ("ip", "nft", "ss"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed (iproute2, nftables)")
    names = (f"umbel-{os.getpid()}-a", f"umbel-{os.getpid()}-b")
    cable = (f"ua{os.getpid()}", f"ub{os.getpid()}")
    made = []
    try:
        try:
            for name in names:
                run("ip", "netns", "add", name)
                made.append(name)
            run(
                "ip",
                "link",
                "add",
                cable[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                cable[1],
                "netns",
                names[1],
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for name, link, address in zip(names, cable, (SERVER, SITE)):
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
        run("ip", "netns", "exec", names[1], "nft", "-f", "-", text=FIREWALL)
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=30)


@pytest.mark.skipif(INSIDE in os.environ, reason="the outer part, which is running")
def test_a_site_that_accepts_nothing_completes_a_run(namespaces, tmp_path) -> None:
    server, site = namespaces
    inner = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-k", "the_inner_part"]
    done = subprocess.run(
        ["ip", "netns", "exec", server, *inner, f"--basetemp={tmp_path / 'inner'}"],
        env={**os.environ, INSIDE: site},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "1 passed" in done.stdout


class Apart(Deployment):
    """Server here, on an address that the site's namespace reaches; sites in the other namespace."""

    apart = False

    def spawn(self, name: str, command: list[str], **env: str) -> subprocess.Popen:
        prefix = ["ip", "netns", "exec", os.environ[INSIDE]] if self.apart else []
        return super().spawn(name, [*prefix, *command], **env)


@pytest.mark.skipif(INSIDE not in os.environ, reason="run by the test above, inside a namespace")
def test_the_inner_part(tmp_path) -> None:
    with Apart(tmp_path) as d:
        d.make("server", "--host", SERVER, "--renew")
        d.kill("flower-superlink")
        text = (d.etc / "server.env").read_text().replace("UMBEL_HOST=127.0.0.1", "UMBEL_HOST=0.0.0.0")
        (d.etc / "server.env").write_text(text)
        d.start_unit("flower-superlink.service")
        d.until_up(d.port)
        d.site("st-mary", 'data="demo:clinic"')
        settings = d.etc / "sites" / "st-mary.env"
        settings.write_text(settings.read_text().replace(f"127.0.0.1:{d.port}", f"{SERVER}:{d.port}"))
        d.register("st-mary")
        d.apart = True
        d.start_unit("flower-supernode@.service", "st-mary")
        d.apart = False
        d.until_online("st-mary")
        listening = run("ip", "netns", "exec", os.environ[INSIDE], "ss", "-Hltn")
        heard = {line.split()[3].rsplit(":", 1)[0].strip("[]") for line in listening.splitlines()}
        assert heard <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening
        with pytest.raises(TimeoutError):
            socket.create_connection((SITE, 9), timeout=1.0)
        run_id = d.start(*SETTINGS, f"run.output-dir={tmp_path / 'run'}")
        assert d.wait(run_id, seconds=150) == "finished:completed", d.log("flower-superlink")
        commit = next(e for e in d.events() if e["event"] == "round_committed")
        assert [a["site"] for a in commit["accepted"]] == ["st-mary"]
