#!/usr/bin/env python3
"""Certificates, site keys and the SuperExec secret of a federation, in one folder. Needs `cryptography` alone.

    certs.py ca DIR                                        ca.key, ca.crt: made once, ca.key stays off the server
    certs.py server DIR --host flower.example.org --host 10.0.0.7
                                                           server.key, server.crt, signed by the ca of DIR
    certs.py site DIR st-mary                              sites/st-mary.key stays at the site, sites/st-mary.pub is sent
    certs.py secret DIR                                    superexec.secret, shared by SuperLink and SuperExec
    certs.py show DIR                                      what is there, its names and when it expires

Every server certificate also names localhost, 127.0.0.1 and ::1: SuperExec and operator dial over loopback.
Nothing is overwritten without --renew; a renewed file replaces the old one atomically, and the old one is kept
as FILE.old. Private files get mode 0600. Elliptic curves: P-256 for TLS, P-384 for site keys, in OpenSSH form, which
is what Flower reads.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import os
import secrets
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LOCAL = ("localhost", "127.0.0.1", "::1")
BACKDATED = datetime.timedelta(minutes=5)


def write(path: Path, data: bytes, *, private: bool, renew: bool) -> None:
    """Write a file atomically; raises FileExistsError when it is there and not to be renewed."""
    if path.exists():
        if not renew:
            raise FileExistsError(f"{path} exists. Use --renew to replace it; the old one is kept as .old")
        os.replace(path, path.with_name(path.name + ".old"))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def tls_key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a TLS key as unencrypted PKCS #8."""
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def name_of(common: str) -> x509.Name:
    """Return a subject with a common name alone."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def alternative(host: str) -> x509.GeneralName:
    """Return an address or a DNS name as a subject alternative name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    days: float,
    ends: datetime.datetime | None,
    extensions: list[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    """Return a signed certificate; days <= 0 makes one that has expired already, for tests of what that looks like."""
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    if ends is not None:
        end = min(end, ends)
    begin = min(now, end) - BACKDATED
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA256())


def usage(*, signs: bool) -> x509.KeyUsage:
    """Return the key usage of an authority (signs certificates) or of a server (signs handshakes)."""
    return x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)


def make_ca(folder: Path, *, days: float, renew: bool) -> None:
    """Make the authority whose certificate every site receives, over a channel that is trusted."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = name_of("Umbel federation authority")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    extensions = [(x509.BasicConstraints(True, 0), True), (usage(signs=True), True), (identifier, False)]
    root = certificate(name, name, key.public_key(), key, days, None, extensions)
    write(folder / "ca.key", tls_key_pem(key), private=True, renew=renew)
    write(folder / "ca.crt", root.public_bytes(serialization.Encoding.PEM), private=False, renew=renew)


def make_server(folder: Path, hosts: list[str], *, days: float, renew: bool) -> None:
    """Make the server's key and certificate for `hosts`, signed by the authority in `folder`."""
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    root = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    names = [alternative(host) for host in dict.fromkeys([*hosts, *LOCAL])]
    extensions = [
        (x509.BasicConstraints(False, None), True),
        (usage(signs=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), False),
    ]
    leaf = certificate(
        name_of(hosts[0]), root.subject, key.public_key(), signer, days, root.not_valid_after_utc, extensions
    )
    write(folder / "server.key", tls_key_pem(key), private=True, renew=renew)
    write(folder / "server.crt", leaf.public_bytes(serialization.Encoding.PEM), private=False, renew=renew)


def make_site(folder: Path, name: str, *, renew: bool) -> None:
    """Make a site's key pair. At a real site this runs at the site: the key never travels, its .pub does."""
    key = ec.generate_private_key(ec.SECP384R1())
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, plain)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write(folder / "sites" / f"{name}.key", private, private=True, renew=renew)
    write(folder / "sites" / f"{name}.pub", public + f" {name}\n".encode(), private=False, renew=renew)


def show(folder: Path) -> None:
    """Print the certificates of `folder` with their names and ends, then the site keys."""
    for file in ("ca.crt", "server.crt"):
        if not (folder / file).is_file():
            print(f"{file:<12} missing")
            continue
        found = x509.load_pem_x509_certificate((folder / file).read_bytes())
        names: list[str] = []
        with contextlib.suppress(x509.ExtensionNotFound):
            value = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            names = [str(entry.value) for entry in value]
        left = (found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
        print(f"{file:<12} until {found.not_valid_after_utc:%Y-%m-%d} ({left} days)  {', '.join(names)}")
    for path in sorted((folder / "sites").glob("*.pub")):
        print(f"site key     {path.stem}")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0, or 1 with a line that says what was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["ca", "server", "site", "secret", "show"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", nargs="?", default="", help="name of the site")
    parser.add_argument("--host", action="append", default=[], help="a DNS name or address of the server")
    parser.add_argument("--days", type=float, help="validity; default: 3650 for the ca, 397 for the server")
    parser.add_argument("--renew", action="store_true", help="replace what is there")
    given = parser.parse_args(arguments)
    try:
        if given.command == "ca":
            make_ca(given.folder, days=3650 if given.days is None else given.days, renew=given.renew)
        elif given.command == "server":
            if not given.host:
                raise ValueError("server needs --host NAME, the name that sites dial; it may be given again")
            days = 397 if given.days is None else given.days
            make_server(given.folder, given.host, days=days, renew=given.renew)
        elif given.command == "site":
            if not given.name or any(c not in "abcdefghijklmnopqrstuvwxyz0123456789-" for c in given.name):
                raise ValueError(
                    f"site needs a name of lower-case letters, digits and hyphens, got {given.name!r}"
                )
            make_site(given.folder, given.name, renew=given.renew)
        elif given.command == "secret":
            secret = secrets.token_hex(32).encode()
            write(given.folder / "superexec.secret", secret, private=True, renew=given.renew)
        else:
            show(given.folder)
    except (OSError, ValueError) as error:
        print(f"certs.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
