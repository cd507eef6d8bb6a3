"""What a site signs about one update, so that neither side can later say something else.

    {"v": 1, "run", "site", "round", "attempt", "base", "frame", "bytes", "tokens", "steps", "prev", "key", "sig"}

`frame` is the SHA-256 of the bytes that left, `prev` the hash of this site's manifest that the server's instruction
named as the last one that counted ("" at the start, "unknown" when the site lost its memory), `sig` an ed25519
signature over the canonical JSON of the rest. It travels in the reply's metrics and holds no number about the data
but the counts that a reply has anyway.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from umbel.ledger.chain import canonical
from umbel.ledger.keys import public_hex, signature_holds

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VERSION = 1
METRIC = "manifest"
UNKNOWN = "unknown"
TEXT = ("run", "site", "base", "frame", "prev", "key", "sig")
NUMBERS = ("v", "round", "attempt", "bytes", "tokens", "steps")


def make_manifest(key: Ed25519PrivateKey, reply: Any, frame: bytes | memoryview, prev: str) -> dict[str, Any]:
    """Return the signed manifest of a reply (`umbel.messages.Reply`) and its frame."""
    manifest = {
        "v": VERSION,
        "run": reply.run,
        "site": reply.site,
        "round": reply.round,
        "attempt": reply.attempt,
        "base": reply.base,
        "frame": hashlib.sha256(frame).hexdigest(),
        "bytes": len(frame),
        "tokens": reply.tokens,
        "steps": reply.steps,
        "prev": prev,
        "key": public_hex(key),
    }
    return {**manifest, "sig": key.sign(canonical(manifest)).hex()}


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Return the hash by which a later manifest names this one: SHA-256 over all of it, signature included."""
    return hashlib.sha256(canonical(dict(manifest))).hexdigest()


def manifest_in(metrics: str | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the manifest in a reply's metrics (JSON text or parsed), None when it has none of the right form."""
    if isinstance(metrics, str):
        try:
            metrics = json.loads(metrics)
        except (ValueError, RecursionError):
            return None
    found = metrics.get(METRIC) if isinstance(metrics, Mapping) else None
    if not isinstance(found, dict) or set(found) != {*TEXT, *NUMBERS}:
        return None
    texts = all(isinstance(found[k], str) and len(found[k]) <= 200 for k in TEXT)
    return found if texts and all(type(found[k]) is int for k in NUMBERS) else None


def manifest_problem(manifest: Mapping[str, Any], said: Mapping[str, Any], frame: bytes | None = None) -> str:
    """Return what is wrong with a manifest, '' when it holds.

    `said` are the same facts from elsewhere (any of the manifest's names); `frame` the bytes that came with it.
    """
    if manifest["v"] != VERSION:
        return f"the manifest has version {manifest['v']}, this program reads {VERSION}"
    for name, value in said.items():
        if manifest[name] != value:
            return f"the site signed {name} = {manifest[name]!r}, not {value!r}"
    if frame is not None and hashlib.sha256(frame).hexdigest() != manifest["frame"]:
        return "the site signed another frame than the one that came"
    rest = {k: v for k, v in manifest.items() if k != "sig"}
    if not signature_holds(manifest["key"], manifest["sig"], canonical(rest)):
        return "the signature is not the site's"
    return ""
