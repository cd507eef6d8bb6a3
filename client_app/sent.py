"""What has left this site: a record of every answer, on the site's own disk. `umbel inspect` shows it.

    <state-dir>/<run>/<site>/sent.jsonl             one chained line an answer: sizes, codec, metrics, manifest
    <state-dir>/<run>/<site>/last.frame             the bytes of the last update, up to KEEP_BYTES
    <state-dir>/<run>/<site>/layout-<digest>.json   names, shapes and dtypes behind a digest that frames name
    <state-dir>/<site>.counters.json                totals, for the metrics endpoint and the policy's hours
    <state-dir>/<site>.key.pem, <site>.audit.jsonl  signing key; what the policy refused

Written where the answer leaves, after everything that could still change it. No value of a tensor and no row of
data is in the records; `last.frame` holds exactly what was sent.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbel.fsio import safe_name, write_atomic
from umbel.ledger import chain
from umbel.ledger.manifest import METRIC, UNKNOWN, make_manifest, manifest_hash, manifest_in
from umbel.messages import STATUS_OK, TRAIN, Instruction, Reply, parse_json
from umbel.telemetry.jsonable import jsonable

KEEP_BYTES = 256 * 2**20
KEEP_RUNS = 20


class Outbox:
    """The records of one site in one state folder."""

    def __init__(self, state_dir: Path, site: str, *, key: Path | None = None) -> None:
        self.root, self.site = state_dir, site
        self.key_path = key or state_dir / f"{safe_name(site)}.key.pem"

    def folder(self, run: str) -> Path:
        """Return the folder of a run: the same as the site's durable state of it."""
        return self.root / safe_name(run) / safe_name(self.site)

    @property
    def audit(self) -> Path:
        """The append-only log of what the site's policy decided."""
        return self.root / f"{safe_name(self.site)}.audit.jsonl"

    @property
    def counters_path(self) -> Path:
        return self.root / f"{safe_name(self.site)}.counters.json"

    def note(self, event: str, **fields: Any) -> None:
        """Append one line to the audit log, durably."""
        chain.append(self.audit, {"t": round(time.time(), 3), "event": event, **jsonable(fields)}, fsync=True)

    def sign(self, instruction: Instruction, reply: Reply, frame: bytes) -> dict[str, Any]:
        """Return the signed manifest of an update; `prev` is the manifest of the update the server says counted."""
        from umbel.ledger.keys import load_or_make

        return make_manifest(load_or_make(self.key_path), reply, frame, self._previous(instruction))

    def _previous(self, instruction: Instruction) -> str:
        settled = parse_json(instruction.settled, "settled")
        if list(settled) == [0, 0]:
            return ""
        for record in reversed(chain.records(self.folder(instruction.run) / "sent.jsonl")):
            manifest = manifest_in({METRIC: record.get(METRIC)})
            if manifest and [manifest["round"], manifest["attempt"]] == list(settled):
                return manifest_hash(manifest)
        return UNKNOWN

    def public_key(self) -> str:
        """Return the site's public key in hex; the key is made when there is none."""
        from umbel.ledger.keys import load_or_make, public_hex

        return public_hex(load_or_make(self.key_path))

    def keep(
        self,
        kind: str,
        instruction: Instruction,
        reply: Reply,
        frame: bytes | None,
        *,
        seconds: float,
        received_bytes: int = 0,
    ) -> None:
        """Record one answer that is about to leave, and count it with the bytes it answers."""
        metrics = parse_json(reply.metrics, "metrics")
        manifest = metrics.pop(METRIC, None)
        record: dict[str, Any] = {
            "t": round(time.time(), 3),
            "kind": kind,
            "run": reply.run,
            "round": reply.round,
            "attempt": reply.attempt,
            "status": reply.status,
            "reason": reply.reason,
            "seconds": round(seconds, 3),
            "metrics": jsonable(metrics),
        }
        if frame is not None:
            counts = {
                "tokens": reply.tokens,
                "steps": reply.steps,
                "weight": reply.weight,
                "loss": reply.loss,
            }
            record |= jsonable(counts)
            record |= {"codec": instruction.up, "payload": reply.payload, "partial": reply.partial}
            digest = manifest["frame"] if manifest else hashlib.sha256(frame).hexdigest()
            record |= {"bytes": len(frame), "frame": digest, METRIC: manifest}
        folder = self.folder(reply.run)
        chain.append(folder / "sent.jsonl", record)
        if frame is not None and len(frame) <= KEEP_BYTES:
            replace_file(folder / "last.frame", frame)
        self.count(kind, record, received_bytes)

    def count(self, kind: str, record: Mapping[str, Any], received_bytes: int) -> None:
        """Add one answer (t, run, round, status, seconds, and what an update has) to the totals."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.counters_path.with_suffix(".lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            totals = self.counters()
            totals["site"] = self.site
            totals["answers"] = totals.get("answers", {})
            name = f"{kind}:{record['status']}"
            totals["answers"][name] = totals["answers"].get(name, 0) + 1
            totals["bytes_down"] = totals.get("bytes_down", 0) + received_bytes
            totals["bytes_up"] = totals.get("bytes_up", 0) + record.get("bytes", 0)
            totals["tokens"] = totals.get("tokens", 0) + (record.get("tokens") or 0)
            runs = totals.setdefault("runs", {})
            spent = runs.pop(record["run"], 0.0) + record["seconds"]
            runs[record["run"]] = spent
            for old in list(runs)[:-KEEP_RUNS]:
                del runs[old]
            totals["last"] = {k: record.get(k) for k in ("t", "kind", "run", "round", "status", "seconds")}
            if kind == TRAIN and record["status"] == STATUS_OK:
                keep = {k: record.get(k) for k in ("t", "run", "round", "loss", "bytes", "tokens", "seconds")}
                totals["update"] = keep | {"residual_ratio": record["metrics"].get("residual_ratio")}
            replace_file(self.counters_path, json.dumps(totals).encode())

    def counters(self) -> dict[str, Any]:
        """Return the totals so far."""
        try:
            found = json.loads(self.counters_path.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def spent_seconds(self, run: str) -> float:
        """Return how long this site has worked for a run."""
        return float(self.counters().get("runs", {}).get(run, 0.0))


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file whole, without forcing it to the disk: records of use, not of truth."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def keep_layout(folder: Path, layout: Any) -> None:
    """Write the names, shapes and dtypes behind a layout's digest, once."""
    path = layout_path(folder, layout.digest())
    if not path.exists():
        write_atomic(path, layout.to_json().encode())


def layout_path(folder: Path, digest: str) -> Path:
    return folder / f"layout-{safe_name(digest)[:24]}.json"


def kept_layout(folder: Path, digest: str) -> Any:
    """Return the layout of that digest, None when it was not kept; what does not hash to it is not believed."""
    from compression.layout import Layout

    try:
        layout = Layout.from_json(layout_path(folder, digest).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return layout if layout.digest() == digest else None
