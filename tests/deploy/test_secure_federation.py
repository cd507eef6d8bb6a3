"""A secure federation on loopback from the shipped unit files, settings and certificate script: one story, one run.

st-mary   registered, its policy names the bundle that comes        joins and trains
county    registered, its policy names another bundle               refuses, and says so in its audit log
stranger  a key that nobody registered                              never online
twin      st-mary's key a second time, while st-mary is online      refused
late      dials a server whose certificate has expired              is told so within seconds
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.deployed import Deployment, settled

from umbel.cli.flower import free_port
from umbel.cli.inspect import bundle_hash

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(280)]

SITE = "flower-supernode@.service"
SETTINGS = [
    "run.rounds=1",
    "clients.minimum=1",
    "clients.deadline-seconds=60",
    "clients.grace-seconds=3",
    "train.local-steps=1",
    "train.batch-size=2",
    "train.threads=1",
    "data.max-length=64",
    "data.limit=8",
    "eval.final=false",
    "telemetry.report=false",
]


def policy(path: Path, allowed: str) -> str:
    path.write_text(f'enforced-by = "site"\n[bundle]\nhashes = ["{allowed}"]\n', "utf-8")
    return f'data="demo:clinic" policy="{path}"'


def until_said(d: Deployment, name: str, words: tuple[str, ...], seconds: float) -> tuple[float, str]:
    """Wait until a process's log holds one of the words; return the seconds that took and the log."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        text = d.log(name)
        if any(word in text for word in words):
            break
        time.sleep(0.2)
    return time.monotonic() - began, d.log(name)


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> dict[str, Any]:
    """All that happened."""
    folder: Path = tmp_path_factory.mktemp("secure")
    with Deployment(folder) as d:
        good = d.site("st-mary", policy(folder / "good.toml", bundle_hash(d.app)))
        d.site("county", policy(folder / "other.toml", "0" * 64))
        unknown = d.site("stranger", 'data="demo:clinic"')
        for name in ("st-mary", "county"):
            d.register(name)
        for name in ("st-mary", "county", "stranger"):
            d.start_unit(SITE, name)
        stranger = d.processes["stranger"]
        d.until_online("st-mary", "county")
        run_id = d.start(*SETTINGS, f"run.output-dir={folder / 'run'}")

        d.site("twin", 'data="demo:clinic"', key="st-mary")
        twin = d.start_unit(SITE, "twin")
        twin_seconds, twin_log = until_said(d, "twin", ("2004",), 30.0)

        old, port = folder / "old", free_port()
        d.make("ca", folder=old)
        d.make("server", "--host", "localhost", "--days", "-1", folder=old)
        command, values = d.command("flower-superlink.service")
        command[command.index("--port") + 1] = str(port)
        for flag, file in (("--ssl-ca-certfile", "ca.crt"), ("--ssl-certfile", "server.crt")):
            command[command.index(flag) + 1] = str(old / file)
        command[command.index("--ssl-keyfile") + 1] = str(old / "server.key")
        command[command.index("--database") + 1] = str(folder / "old.db")
        d.spawn("expired", command, **values)
        late = d.site("late", 'data="demo:clinic"', port=port, UMBEL_CA=str(old / "ca.crt"))
        _, found = d.doctor("--role", "site", "--settings", str(late), "--only", "network")
        for _ in range(50):
            if found["port"]["status"] == "PASS":
                break
            time.sleep(0.3)
            _, found = d.doctor("--role", "site", "--settings", str(late), "--only", "network")
        d.start_unit(SITE, "late")
        late_seconds, late_log = until_said(d, "late", ("expired",), 30.0)

        status = d.wait(run_id, seconds=120)
        network = {
            name: d.doctor("--role", "site", "--settings", str(file), "--only", "network")
            for name, file in (("st-mary", good), ("stranger", unknown))
        }
        server = d.doctor("--role", "server", "--settings", str(d.etc / "server.env"), "--only", "files")
        return {
            "status": status,
            "events": d.events(),
            "online": d.online(),
            "ids": dict(d.node_ids),
            "codes": {"stranger": stranger.poll(), "twin": twin.poll()},
            "twin": (twin_seconds, twin_log),
            "late": (late_seconds, late_log, found),
            "audit": settled(d.var / "county"),
            "network": network,
            "server": server,
            "logs": {n: d.log(n) for n in ("flower-superlink", "flower-superexec", "st-mary", "stranger")},
        }


def test_the_run_finishes_with_the_site_that_is_known_and_lets_the_bundle_in(story) -> None:
    assert story["status"] == "finished:completed", story["logs"]
    commit = next(e for e in story["events"] if e["event"] == "round_committed")
    assert [a["site"] for a in commit["accepted"]] == ["st-mary"]


def test_an_unknown_key_is_refused(story) -> None:
    assert story["online"] == {story["ids"]["st-mary"], story["ids"]["county"]}
    assert story["codes"]["stranger"] not in (None, 0)
    assert "2004" in story["logs"]["stranger"], story["logs"]["stranger"]


def test_a_second_login_with_the_same_key_is_refused_and_the_first_works_on(story) -> None:
    seconds, log = story["twin"]
    assert "2004" in log, log
    assert seconds < 30
    assert story["codes"]["twin"] not in (None, 0)


def test_an_expired_certificate_is_named_within_seconds(story) -> None:
    seconds, log, found = story["late"]
    assert "expired" in log, log
    assert seconds < 15
    assert (found["tls"]["status"], "expired" in found["tls"]["found"]) == ("FAIL", True), found


def test_a_bundle_that_is_not_on_the_list_is_refused_by_the_site(story) -> None:
    refused = [e for e in story["events"] if e["event"] == "site_refused"]
    assert [e["site"] for e in refused] == ["county"]
    assert "is not among bundle.hashes" in refused[0]["reason"]
    lines = [line for line in story["audit"] if line.get("event") == "refused"]
    assert lines
    assert "is not among bundle.hashes" in lines[0]["reason"]


def test_the_doctor_sees_a_good_site_a_stranger_and_a_good_server(story) -> None:
    """The good site passes everything against the living server; the stranger fails on its key alone."""
    code, found = story["network"]["st-mary"]
    assert (code, {c["status"] for c in found.values()}) == (0, {"PASS"}), found
    assert set(found) == {"dns", "port", "tls", "clock", "registered"}
    code, found = story["network"]["stranger"]
    assert code == 1
    assert {name for name, c in found.items() if c["status"] != "PASS"} == {"registered"}, found
    code, found = story["server"]
    assert (code, {c["status"] for c in found.values()}) == (0, {"PASS"}), found
