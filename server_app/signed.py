"""Signed manifests on the server's side: an update of a site with a key must be what that site signed.

A site that named its public key when it joined signs every update (`umbel.ledger.manifest`). One without a key is
taken as it is: what it sends is validated all the same, only not provable later.
"""

from __future__ import annotations

from typing import Any

from server_app.validate import Rejected
from umbel.ledger.manifest import manifest_in, manifest_problem
from umbel.messages import Reply


def check_signed(reply: Reply, frame: bytes, key: object) -> None:
    """Raise Rejected "manifest" when the update is not what the owner of `key` (hex, or nothing) signed."""
    manifest = manifest_in(reply.metrics)
    if manifest is None:
        if isinstance(key, str) and key:
            raise Rejected("manifest", "the site has a key and did not sign this update")
        return
    said: dict[str, Any] = {
        "run": reply.run,
        "site": reply.site,
        "round": reply.round,
        "attempt": reply.attempt,
        "base": reply.base,
        "tokens": reply.tokens,
        "steps": reply.steps,
        "bytes": len(frame),
    }
    if isinstance(key, str) and key:
        said["key"] = key
    problem = manifest_problem(manifest, said, frame)
    if problem:
        raise Rejected("manifest", problem)


def signed_fields(reply: Reply) -> dict[str, Any]:
    """Return {"manifest": ...} for a round's record; nothing for an unsigned update."""
    manifest = manifest_in(reply.metrics)
    return {"manifest": manifest} if manifest else {}
