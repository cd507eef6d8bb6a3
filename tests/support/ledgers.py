"""A run folder as a server and its sites would leave it: events, ledger, kept updates, real signatures."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from umbel.ledger import keys
from umbel.ledger.book import Book
from umbel.ledger.manifest import make_manifest, manifest_hash
from umbel.messages import Reply


class SignedRun:
    """Writes what a server and its sites would: events, ledger, kept updates."""

    def __init__(self, folder: Path, key_folder: Path) -> None:
        self.folder, self.keys = folder, key_folder
        self.folder.mkdir(exist_ok=True)
        self.book = Book(folder)
        self.last: dict[str, str] = {}
        self.states = {0: ""}

    def key(self, site: str) -> Any:
        return keys.load_or_make(self.keys / site)

    def event(self, **fields: Any) -> None:
        with open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps({"t": 1.0, **fields}) + "\n")

    def round(
        self, index: int, sites: tuple[str, ...] = ("clinic", "kitchen"), attempt: int = 1, **more: Any
    ) -> None:
        accepted, updates = [], self.folder / "updates" / f"round-{index:06d}-{attempt:04d}"
        updates.mkdir(parents=True, exist_ok=True)
        kept = []
        for number, site in enumerate(sites):
            frame = f"{site}{index}{attempt}".encode()
            reply = Reply("r", index, attempt, "b", site, tokens=100 * index, steps=5)
            manifest = make_manifest(self.key(site), reply, frame, self.last.get(site, "")) | more
            self.last[site] = manifest_hash(manifest)
            entry = {
                "site": site,
                "weight": 1.0,
                "tokens": 100 * index,
                "steps": 5,
                "bytes": len(frame),
                "crc": "c",
            }
            accepted.append({**entry, "late": False, "of_round": index, "manifest": manifest})
            (updates / f"{number:03d}.frame").write_bytes(frame)
            kept.append({"key": site, "weight": 1.0})
        (updates / "index.json").write_text(json.dumps(kept))
        state = hashlib.sha256(f"{index}.{attempt}".encode()).hexdigest()
        record = {
            "round": index,
            "attempt": attempt,
            "outcome": "commit",
            "accepted": accepted,
            "state_crc": state,
        }
        self.event(event="round_committed", **record)
        self.book.commit("r", record)
