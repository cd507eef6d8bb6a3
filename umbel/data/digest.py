"""A fingerprint of a data set that two runs can compare without showing a row.

    digest = SHA-256( "umbel-rows-1" || num_rows || sorted SHA-256(canonical JSON of each row) )

The digest does not depend on the order of the rows, and it counts repetitions: a row that is there twice
gives another digest than the same row once. Canonical JSON = sorted keys, no spaces, UTF-8. It is a
fingerprint, not an anonymisation: somebody who guesses a whole data set can confirm the guess, so it stays on
the site.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Return one byte string for equal values: sorted keys, no spaces; `str` for what JSON lacks."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    # A lone surrogate can come out of a JSON escape; it has no UTF-8 form but must not stop a run.
    return text.encode("utf-8", "surrogatepass")


def row_digest(row: Mapping[str, Any]) -> bytes:
    """Return the 32 bytes of SHA-256 over the row's canonical JSON."""
    return hashlib.sha256(canonical_json(row)).digest()


def dataset_digest(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return 64 hex digits that identify the multiset of rows, whatever their order."""
    digests = sorted(row_digest(row) for row in rows)
    total = hashlib.sha256(b"umbel-rows-1" + len(digests).to_bytes(8, "little"))
    for digest in digests:
        total.update(digest)
    return total.hexdigest()
