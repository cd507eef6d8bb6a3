"""Certificates, keys and secrets on this disk: there, dated, matching each other, readable by their owner alone."""

from __future__ import annotations

import datetime
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from umbel.telemetry.machine import FAIL, PASS, WARN, Check

WARN_DAYS = 30
SECRET_BYTES = 32


def utc_now() -> datetime.datetime:
    """The time of this machine."""
    return datetime.datetime.now(datetime.UTC)


def server_files(
    ca: Path, cert: Path, key: Path, secret: Path, *, now: datetime.datetime | None = None
) -> Iterator[Check]:
    """The files of a secure server: authority, certificate (signed by it), key (of it), SuperExec secret."""
    yield check_certificate("authority", ca, now=now)
    yield check_certificate("certificate", cert, now=now)
    yield check_chain(ca, cert)
    yield check_names(cert)
    yield check_key(key, cert)
    yield check_private("secret", secret, least_bytes=SECRET_BYTES)


def check_certificate(name: str, path: Path, *, now: datetime.datetime | None = None) -> Check:
    """A PEM certificate that holds today and for some weeks."""
    now = now or utc_now()
    certificate, problem = _certificate(name, path)
    if problem:
        return problem
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= end:
        remedy = "Renew it: certs.py server DIR --renew (a new authority has to be given to every site)."
        return Check(name, FAIL, f"{path.name} expired on {end:%Y-%m-%d %H:%M} UTC", remedy)
    if now < begin:
        remedy = "Set this machine's clock; otherwise wait, or issue it again."
        return Check(name, FAIL, f"{path.name} is not valid before {begin:%Y-%m-%d %H:%M} UTC", remedy)
    if (end - now).days < WARN_DAYS:
        return Check(
            name, WARN, f"{path.name} expires on {end:%Y-%m-%d}", "Renew it before: certs.py ... --renew."
        )
    return Check(name, PASS, f"{path.name}, until {end:%Y-%m-%d}")


def check_chain(ca: Path, cert: Path) -> Check:
    """Did this authority sign this certificate?"""
    from cryptography.exceptions import InvalidSignature

    root, wrong_root = _certificate("chain", ca)
    leaf, wrong_leaf = _certificate("chain", cert)
    if wrong_root or wrong_leaf:
        return wrong_root or wrong_leaf or Check("chain", FAIL, "unread")
    try:
        leaf.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        remedy = "Name the ca.crt that server.crt was made with, here and at every site."
        return Check("chain", FAIL, f"{cert.name} was signed by another authority than {ca.name}", remedy)
    return Check("chain", PASS, f"{ca.name} signed {cert.name}")


def check_names(cert: Path) -> Check:
    """What sites may dial; the common name is not looked at by anybody."""
    from cryptography import x509

    leaf, problem = _certificate("names", cert)
    if problem:
        return problem
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        remedy = "Issue it with names: certs.py server DIR --host NAME --renew."
        return Check("names", FAIL, f"{cert.name} has no subject alternative name", remedy)
    addresses = [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    return Check("names", PASS, ", ".join([*found.get_values_for_type(x509.DNSName), *addresses]))


def check_key(key: Path, cert: Path) -> Check:
    """The TLS key: of this certificate, without a passphrase, for its owner alone."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    private = check_private("key", key)
    leaf, problem = _certificate("key", cert)
    if private.status == FAIL or problem:
        return private if private.status == FAIL else problem or private
    try:
        secret = load_pem_private_key(key.read_bytes(), None)
    except (ValueError, TypeError) as error:
        return Check(
            "key",
            FAIL,
            f"{key.name} is no private key without a passphrase ({error})",
            "certs.py server DIR --renew",
        )
    if secret.public_key() != leaf.public_key():
        return Check(
            "key", FAIL, f"{key.name} does not belong to {cert.name}", "Name the pair that was made together."
        )
    return private


def check_private(name: str, path: Path, least_bytes: int = 1) -> Check:
    """A file that its owner alone can read."""
    problem = _unreadable(path)
    if problem:
        return Check(name, FAIL, problem, "Make it with certs.py, or give this user the right to read it.")
    facts = path.stat()
    if facts.st_size < least_bytes:
        remedy = "Make it with certs.py secret DIR."
        return Check(
            name, FAIL, f"{path.name} has {facts.st_size} bytes, at least {least_bytes} are needed", remedy
        )
    if facts.st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return Check(name, FAIL, f"{path.name} can be read by others", f"chmod 600 {path}")
    return Check(name, PASS, f"{path.name}, for its owner alone")


def check_site_key(path: Path) -> Check:
    """The site's elliptic-curve key; its fingerprint is what `ssh-keygen -lf FILE.pub` prints."""
    from base64 import b64decode, b64encode
    from hashlib import sha256

    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = check_private("site key", path)
    if private.status == FAIL:
        return private
    data, remedy = path.read_bytes(), "Make one: certs.py site DIR NAME."
    load: Any = serialization.load_pem_private_key
    if b"OPENSSH" in data[:40]:
        load = serialization.load_ssh_private_key
    try:
        key = load(data, None)
    except (ValueError, TypeError) as error:
        return Check(
            "site key", FAIL, f"{path.name} is no private key without a passphrase ({error})", remedy
        )
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return Check("site key", FAIL, f"{path.name} is no elliptic-curve key, as Flower asks for", remedy)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    digest = b64encode(sha256(b64decode(line.split()[1])).digest()).decode().rstrip("=")
    return Check("site key", PASS, f"{path.name}, SHA256:{digest}")


def _certificate(name: str, path: Path) -> tuple[Any, Check | None]:
    """Return (certificate, None), or (None, why there is none)."""
    from cryptography import x509

    problem = _unreadable(path)
    if problem:
        return None, Check(name, FAIL, problem, "Make it with certs.py, or correct the path.")
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())[0], None
    except ValueError as error:
        return None, Check(
            name, FAIL, f"{path.name} is no PEM certificate ({error})", "Make it with certs.py."
        )


def _unreadable(path: Path) -> str:
    if not path.is_file():
        return f"{path} is not there"
    try:
        path.open("rb").close()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return ""
