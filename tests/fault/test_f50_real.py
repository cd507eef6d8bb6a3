"""F50: who and what is turned away, with real processes behind TLS and node keys. One SuperLink, one run.

ant   a registered key, no policy of its own                       takes part
bee   a registered key; its policy allows another bundle only      refuses, and says so in its audit log
cat   a key that was registered and then taken off the list        never online
dog   a key that nobody registered                                 never online
eel   a registered key, and the certificate of another authority   does not even talk

Beside them: the open profile on an address that others reach, which the shipped services refuse to start with.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import subprocess
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.federation import CONNECTION, Federation

from umbel.cli.flower import free_port, tool

pytestmark = [pytest.mark.fault, pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(400)]

NODES = ("ant", "bee", "cat", "dog", "eel")
SETTINGS = [
    "run.rounds=1",
    "clients.minimum=1",
    "clients.deadline-seconds=60",
    "clients.grace-seconds=5",
    "train.local-steps=1",
    "train.batch-size=2",
    "train.threads=1",
    "data.max-length=64",
    "data.limit=8",
    "eval.final=false",
    "telemetry.report=false",
]


class Authority:
    """A certificate authority of its own, with one server certificate for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        root = self._signed(name, name, key.public_key(), key, ca=True)
        server = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
        leaf = self._signed(subject, name, server.public_key(), key, ca=False)
        pem = serialization.Encoding.PEM
        self.root, self.cert, self.key = (folder / f for f in ("ca.pem", "server.pem", "server.key"))
        self.root.write_bytes(root.public_bytes(pem))
        self.cert.write_bytes(leaf.public_bytes(pem))
        self.key.write_bytes(
            server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )

    @staticmethod
    def _signed(
        subject: x509.Name, issuer: x509.Name, public: Any, key: Any, *, ca: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(alternative, critical=False)
            .sign(key, hashes.SHA256())
        )


def node_key(folder: Path, name: str) -> ec.EllipticCurvePrivateKey:
    """Write `name` and `name.pub` as ssh-keygen would and return the key."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh = serialization.Encoding.OpenSSH
    (folder / name).write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    )
    (folder / f"{name}.pub").write_bytes(
        key.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH)
    )
    return key


class SecureFederation(Federation):
    """The loopback federation with TLS and node keys instead of --insecure."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {})
        self.ours, self.other = Authority(folder / "ours"), Authority(folder / "other")
        self.keys = {name: node_key(folder, name) for name in NODES}

    def __enter__(self) -> SecureFederation:
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.ours.root}"\n'
        )
        self.start_superlink()
        return self

    def start_superlink(self) -> None:
        command = [tool("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--ssl-ca-certfile", str(self.ours.root), "--ssl-certfile", str(self.ours.cert)]
        command += ["--ssl-keyfile", str(self.ours.key), "--enable-supernode-auth"]
        self.spawn("superlink", [*command, "--disable-runtime-dependency-installation"])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self.answers("/health"):
            time.sleep(0.2)

    def answers(self, path: str) -> bool:
        import httpx

        try:
            return httpx.get(f"https://127.0.0.1:{self.port}{path}", verify=self.context()).status_code == 200
        except httpx.TransportError:
            return False

    def context(self) -> Any:
        import ssl

        return ssl.create_default_context(cafile=str(self.ours.root))

    def start_node(self, name: str, root: Path, **facts: str) -> None:
        facts = {"name": name, "data": "demo:clinic", "state-dir": str(self.state / name), **facts}
        text = " ".join(f'{key}="{value}"' for key, value in facts.items())
        command = [tool("flower-supernode"), "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--root-certificates", str(root), "--auth-supernode-private-key", str(self.folder / name)]
        command += ["--port", str(free_port()), "--node-config", text, "--max-retries", "1"]
        self.spawn(name, command)

    def flwr(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [tool("flwr"), *arguments, "--format", "json"],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return json.loads(done.stdout[done.stdout.index("{") :])

    def register(self, name: str) -> str:
        """Put a node's key on the list and return its id."""
        return str(
            self.flwr("supernode", "register", str(self.folder / f"{name}.pub"), CONNECTION)["node-id"]
        )

    def heartbeat(self, name: str, node_id: str, signed_at: datetime.datetime, **headers: str) -> int:
        """Send a heartbeat with a signature made over `signed_at`; return the HTTP status."""
        import httpx
        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

        stamp = signed_at.isoformat()
        key = self.keys[name]
        sent = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
            TIMESTAMP_HEADER: stamp,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, stamp.encode())).decode(),
            "Content-Type": "application/protobuf",
            "Accept": "application/protobuf",
            **headers,
        }
        body = SendNodeHeartbeatRequest(node=Node(node_id=int(node_id)), heartbeat_interval=30.0)
        return httpx.post(
            f"https://127.0.0.1:{self.port}/v1/fleet/send-node-heartbeat",
            content=body.SerializeToString(),
            headers=sent,
            verify=self.context(),
        ).status_code


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> dict[str, Any]:
    """Everything that happened."""
    folder: Path = tmp_path_factory.mktemp("f50")
    with SecureFederation(folder) as f:
        ids = {name: f.register(name) for name in ("ant", "bee", "cat", "eel")}
        f.flwr("supernode", "unregister", ids["cat"], CONNECTION)
        policy = folder / "policy.toml"
        policy.write_text(f'enforced-by = "app"\n[bundle]\nhashes = ["{"0" * 64}"]\n')
        f.start_node("ant", f.ours.root)
        f.start_node("bee", f.ours.root, policy=str(policy))
        f.start_node("cat", f.ours.root)
        f.start_node("dog", f.ours.root)
        f.start_node("eel", f.other.root)
        processes = dict(f.processes)
        run_id = f.start(*SETTINGS, f"run.output-dir={folder / 'run'}")
        status = f.wait(run_id, seconds=200)
        now = datetime.datetime.now(datetime.UTC)
        old = now - datetime.timedelta(minutes=20)
        statuses = {
            "fresh": f.heartbeat("ant", ids["ant"], now),
            "replayed": f.heartbeat("ant", ids["ant"], old),
            "early": f.heartbeat("ant", ids["ant"], now + datetime.timedelta(minutes=20)),
            "stolen id": f.heartbeat("bee", ids["ant"], now),
            "unknown key": f.heartbeat("dog", ids["ant"], now),
            "revoked key": f.heartbeat("cat", ids["cat"], now),
        }
        nodes = f.flwr("supernode", "list", CONNECTION, "--verbose")
        codes = {name: processes[name].poll() for name in NODES}
        return {
            "folder": folder,
            "status": status,
            "events": f.events(),
            "http": statuses,
            "nodes": nodes,
            "codes": codes,
            "ids": ids,
            "logs": {name: f.log(name) for name in (*NODES, "superlink")},
        }


def test_f50_only_the_node_that_is_known_and_lets_the_bundle_in_takes_part(story) -> None:
    assert story["status"] == "finished:completed", story["logs"]["superlink"]
    joined = [e["site"] for e in story["events"] if e["event"] == "site_joined"]
    assert joined == ["ant"]
    commit = next(e for e in story["events"] if e["event"] == "round_committed")
    assert [a["site"] for a in commit["accepted"]] == ["ant"]


@pytest.mark.parametrize("name", ["dog", "cat"])
def test_f50_an_unknown_and_a_revoked_key_never_come_online(story, name) -> None:
    """F50: the node says why and is not running on quietly; the list of nodes does not show it as online."""
    online = [n for n in story["nodes"]["nodes"] if n.get("status") == "online"]
    assert {str(n["node-id"]) for n in online} == {story["ids"]["ant"], story["ids"]["bee"]}
    assert story["codes"][name] not in (None, 0), story["logs"][name]
    assert "activate" in story["logs"][name].lower() or "auth" in story["logs"][name].lower()


def test_f50_another_authority_ends_the_talk_before_it_begins(story) -> None:
    assert "eel" not in {e.get("site") for e in story["events"]}
    assert "certificate" in story["logs"]["eel"].lower() or "ssl" in story["logs"]["eel"].lower()


def test_f50_a_replayed_request_and_a_stolen_identity_are_refused(story) -> None:
    """F50: a signature is good for minutes, for one node; whatever else is wrong is a 401."""
    assert story["http"].pop("fresh") == 200
    assert set(story["http"].values()) == {401}, story["http"]


def test_f50_a_bundle_that_a_site_does_not_allow_is_refused_and_audited_on_both_sides(story) -> None:
    refused = [e for e in story["events"] if e["event"] == "site_refused"]
    assert [e["site"] for e in refused] == ["bee"]
    assert "is not among bundle.hashes" in refused[0]["reason"]
    audits = [p for p in (story["folder"] / "state" / "bee").rglob("*.jsonl") if p.is_file()]
    lines = [json.loads(line) for p in audits for line in p.read_text().splitlines()]
    refusals = [line for line in lines if line.get("event") == "refused"]
    assert refusals
    assert "is not among bundle.hashes" in refusals[0]["reason"]


@pytest.mark.parametrize(
    ("role", "unit", "change"),
    [
        ("server", "flower-superlink.service", ("UMBEL_HOST=127.0.0.1", "UMBEL_HOST=0.0.0.0")),
        ("site", "flower-supernode@.service", ("127.0.0.1:8000", "192.0.2.7:8000")),
    ],
)
def test_f50_an_open_profile_off_loopback_does_not_start_and_says_why(tmp_path, role, unit, change) -> None:
    """F50: what the shipped unit runs before its service fails, so the service never listens; loopback is let through."""
    import os
    import shlex
    import sys

    deploy = Path(__file__).resolve().parents[2] / "deploy"
    entry = next(
        x
        for x in (deploy / "systemd" / unit).read_text("utf-8").splitlines()
        if x.startswith("ExecStartPre=")
    )
    text = (deploy / "profiles" / f"open-{role}.env").read_text("utf-8")
    assert change[0] in text
    for name, settings, code in (("kept", text, 0), ("changed", text.replace(*change), 1)):
        file = tmp_path / f"{name}.env"
        file.write_text(settings)
        words = shlex.split(entry.removeprefix("ExecStartPre="))
        words[0] = str(Path(sys.executable).parent / Path(words[0]).name)
        words[words.index("--settings") + 1] = str(file)
        done = subprocess.run(
            words, env=dict(os.environ), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert ("is not loopback" in done.stdout) == bool(code)
