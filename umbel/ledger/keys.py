"""A site's ed25519 key: made at first use in the site's state folder, mode 0600, or given by the operator.

PEM (PKCS#8), without a passphrase, as Flower's own node keys are. The public key is its 32 bytes in hex. The
cryptography is the `cryptography` package's.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from umbel.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def load_or_make(path: Path) -> Ed25519PrivateKey:
    """Return the key in `path`, made when there is none; ConfigError for a key others can read, or another kind."""
    try:
        return load(path)
    except FileNotFoundError:
        pass
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, pem)
        os.fsync(handle)
        # A link fails when another process was first: then its key is the site's.
        os.link(temporary, path)
    except FileExistsError:
        return load(path)
    finally:
        os.close(handle)
        temporary.unlink(missing_ok=True)
    return key


def load(path: Path) -> Ed25519PrivateKey:
    """Return the key in `path`; FileNotFoundError, or ConfigError for one that must not be used."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            "signing key", "can be read by others", got=f"{path}, mode {mode:o}", allowed="mode 600",
            remedy=f"chmod 600 {path}",
        )  # fmt: skip
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError):
        key = None  # type: ignore[assignment]
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            "signing key",
            "is not an ed25519 key in PEM",
            got=str(path),
            allowed="`openssl genpkey -algorithm ed25519`",
        )
    return key


def public_hex(key: Ed25519PrivateKey) -> str:
    """Return the public key as 64 hex digits."""
    return key.public_key().public_bytes_raw().hex()


def signature_holds(public: str, signature: str, message: bytes) -> bool:
    """Tell whether `signature` (hex) is that of the owner of `public` (hex) over `message`. Never raises."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True
