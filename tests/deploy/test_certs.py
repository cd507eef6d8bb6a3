"""deploy/certs/certs.py: what it makes holds, is private where it must be, and is renewed without a gap."""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from support.deployed import CERTS


def certs(*arguments: str | Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(CERTS), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("certs")
    certs("ca", folder)
    certs("server", folder, "--host", "flower.example.org", "--host", "10.0.0.7")
    certs("site", folder, "st-mary")
    certs("secret", folder)
    return folder


@pytest.fixture
def made(first, tmp_path) -> Path:
    """A copy of what was made once, with its modes, for each test to spoil."""
    return Path(shutil.copytree(first, tmp_path / "certs"))


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_server_certificate_names_its_hosts_and_loopback_and_is_the_authority_s(made) -> None:
    leaf, root = read(made / "server.crt"), read(made / "ca.crt")
    leaf.verify_directly_issued_by(root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["flower.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(a) for a in ("10.0.0.7", "127.0.0.1", "::1")
    ]
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days == 397


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_openssl_agrees(made) -> None:
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_ip", "10.0.0.7"]
    command += ["-CAfile", str(made / "ca.crt"), str(made / "server.crt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_private_files_are_for_one_user_and_the_site_s_two_keys_belong_together(made) -> None:
    private = ["ca.key", "server.key", "superexec.secret", "sites/st-mary.key"]
    assert {(made / f).stat().st_mode & 0o777 for f in private} == {0o600}
    key = load_ssh_private_key((made / "sites" / "st-mary.key").read_bytes(), None)
    public = load_ssh_public_key((made / "sites" / "st-mary.pub").read_bytes())
    assert key.public_key() == public
    assert len((made / "superexec.secret").read_bytes()) == 64


def test_nothing_is_overwritten_without_a_word_and_a_renewed_file_keeps_the_old_one(made) -> None:
    before = (made / "server.crt").read_bytes()
    said = certs("server", made, "--host", "flower.example.org", code=1)
    assert "--renew" in said
    assert (made / "server.crt").read_bytes() == before
    certs("server", made, "--host", "flower.example.org", "--renew")
    assert (made / "server.crt.old").read_bytes() == before
    read(made / "server.crt").verify_directly_issued_by(read(made / "ca.crt"))


def test_show_tells_names_and_ends(made) -> None:
    said = certs("show", made)
    assert "flower.example.org" in said
    assert "(396 days)" in said
    assert "st-mary" in said


@pytest.mark.parametrize("arguments", [("server",), ("site", "St Mary"), ("site", "../x")])
def test_wrong_words_are_one_line(made, arguments) -> None:
    command, *rest = arguments
    said = certs(command, made, *rest, code=1)
    assert said.startswith("certs.py: ")
    assert "Traceback" not in said


def test_the_commands_of_the_deployment_page_run_in_their_order(tmp_path) -> None:
    """H40: certificates, a site's key, rotation, as the page has them."""
    page = (CERTS.parents[2] / "docs" / "deployment.md").read_text("utf-8")
    lines = [x for x in page.splitlines() if x.startswith("deploy/certs/certs.py ")]
    assert {x.split()[1] for x in lines} == {"ca", "server", "secret", "site", "show"}
    for line in lines:
        words = line.split()[1:]
        words[1] = str(tmp_path / words[1])
        certs(*words)
    assert (tmp_path / "certs" / "server.crt.old").is_file()
    assert (tmp_path / "certs" / "sites" / "st-mary.pub").is_file()
