"""Keys between pairs of sites, and what is made of them: sealed shares, and masks that cancel in a sum.

    key(u, v)  = HKDF-SHA256(X25519(secret_u, public_v), info = session | purpose | names)
    mask(key)  = ChaCha20 keystream of `key`, 64 bits a value, taken mod 2^m
    seal(key)  = ChaCha20-Poly1305, one message a key, bound to its sender and receiver

The modulus is a power of two, so that truncating the stream leaves it uniform. Every key is used for one session
only, which is why the nonces may be zero. RFC 7748, 5869, 8439, through the package `cryptography`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from compression.errors import FrameError
from compression.secure_sum import SumPlan

# Values masked at a time: bounds the keystream to 8 MiB whatever the tensor.
_BLOCK = 1 << 20
_ZERO_NONCE = b"\x00" * 12


class KeyPair(NamedTuple):
    """32 bytes each."""

    secret: bytes
    public: bytes


def new_pair() -> KeyPair:
    """Return a fresh X25519 pair."""
    key = X25519PrivateKey.generate()
    return KeyPair(key.private_bytes_raw(), key.public_key().public_bytes_raw())


def public_of(secret: bytes) -> bytes:
    """Return the public key of a secret one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, public: bytes, *info: str) -> bytes:
    """Return 32 bytes that both ends of a pair can compute and nobody else. Raises FrameError for a bad key."""
    try:
        point = X25519PublicKey.from_public_bytes(public)
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(point)
    except ValueError as error:
        raise FrameError("key", f"a public key is unusable: {error}") from error
    text = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in info)
    return HKDF(SHA256(), 32, salt=None, info=text).derive(shared)


def add_mask(values: np.ndarray, key: bytes, plan: SumPlan, sign: int) -> None:
    """Add (`sign` 1) or take away (-1) the mask of `key`, mod 2^m, in place; values are (n,) uint64."""
    stream = Cipher(algorithms.ChaCha20(key, b"\x00" * 16), mode=None).encryptor()
    bits = np.uint64(plan.mask)
    for start in range(0, values.size, _BLOCK):
        part = values[start : start + _BLOCK]
        mask = np.frombuffer(stream.update(b"\x00" * (8 * part.size)), "<u8").astype(np.uint64) & bits
        part[:] = (part + mask if sign > 0 else part - mask) & bits


def seal(key: bytes, data: bytes) -> bytes:
    """Encrypt the one message that `key` is ever used for."""
    return ChaCha20Poly1305(key).encrypt(_ZERO_NONCE, data, None)


def unseal(key: bytes, data: bytes) -> bytes:
    """Inverse of `seal`; raises FrameError when a bit differs."""
    try:
        return ChaCha20Poly1305(key).decrypt(_ZERO_NONCE, data, None)
    except InvalidTag as error:
        raise FrameError("seal", "a sealed share was changed or is for somebody else") from error
