"""One small JSON file a worker that says what it is doing, for a person at the site: no data, no loss of a row."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from client_app.resident.processes import Process, alive


def write(path: Path, facts: dict[str, Any]) -> None:
    """Replace the file in one step; not synced to disk, because it describes a process that lives."""
    temporary = path.with_suffix(".json.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "w", encoding="utf-8") as file:
        json.dump({**facts, "updated_at": time.time()}, file)
    os.replace(temporary, path)


def read(path: Path) -> dict[str, Any] | None:
    """Return what a worker wrote, with `alive` added; None when the file is not one of ours."""
    try:
        facts = json.loads(path.read_text("utf-8"))
        facts["alive"] = alive(Process(int(facts["pid"]), int(facts["start"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts


def folders(state_dirs: list[Path]) -> list[Path]:
    """Return the folders in which workers of these state folders, or of a state folder below them, may be."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [Path(runtime) / "umbel"] if runtime else []
    for state in state_dirs:
        found += [state / ".resident", *state.glob("*/.resident")]
    return [folder for folder in found if folder.is_dir()]


def line(facts: dict[str, Any]) -> str:
    """Return one worker as one line."""
    memory = f"{facts['memory_bytes'] / 2**20:.0f} MiB"
    head = f"{facts['site']:<20} pid {facts['pid']:<8} {memory:>10}  {facts['served']} served"
    if not facts.get("busy"):
        return f"{head}  idle"
    left = facts.get("deadline_seconds", 0.0)
    return (
        f"{head}  {facts.get('kind')} run {facts.get('run')} round {facts.get('round')} step {facts.get('step')}  "
        f"{facts.get('tokens_per_second', 0.0):.0f} tokens/s  {left:.0f} s to the deadline"
    )


def main(arguments: list[str]) -> int:
    """Print the workers that run; `--json` prints the objects. Exit code 1 when there is none."""
    as_json = "--json" in arguments
    states = [Path(a).expanduser() for a in arguments if a != "--json"]
    found = [facts for f in folders(states) for p in sorted(f.glob("*.json")) if (facts := read(p))]
    running = [facts for facts in found if facts["alive"]]
    if as_json:
        print(json.dumps(running))
    else:
        print("\n".join(line(facts) for facts in running) or "no resident worker runs here")
    return 0 if running else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
