"""`umbel ledger`: who contributed what to a run, and whether its signed records hold.

umbel ledger RUN                     one line a site: rounds, steps, tokens, bytes, key, change of held-out loss
umbel ledger RUN --leave-one-out     compute that change (needs telemetry.keep-updates and held-out rows)
umbel ledger verify RUN              0, or 1 with the first broken link
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from umbel.cli.show import make_console, make_table
from umbel.ledger.contributions import contributions
from umbel.ledger.verify import verify
from umbel.telemetry.units import DASH, count, size


def show_ledger(run: Path, *, as_json: bool = False) -> int:
    """Print the table of contributions; returns 0."""
    rows = contributions(run)
    if as_json:
        print(json.dumps({"run": run.name, "sites": rows}, indent=2))
        return 0
    out = make_console()
    header = ["Site", "Rounds", "Steps", "Tokens", "Share", "Up", "Down", "Signed", "Loss without it", "Key"]
    cells = [
        [
            r["site"],
            str(r["rounds"]),
            count(r["steps"]),
            count(r["tokens"]),
            f"{r['share']:.1%}",
            size(r["bytes_up"]),
            size(r["bytes_down"]),
            f"{r['signed']}/{r['rounds']}",
            DASH if r["loss_change"] is None else f"{r['loss_change']:+.4f}",
            (r["key"] or DASH)[:16],
        ]
        for r in rows
    ]
    out.print(make_table(out, f"Contributions to {run.name}", header, cells, right=range(1, 9)))
    return 0


def verify_ledger(run: Path, *, as_json: bool = False) -> int:
    """Print what the verification found; 0 when the ledger holds, 1 with the first broken link."""
    found = verify(run)
    if as_json:
        facts: dict[str, Any] = {"ok": found.ok, **vars(found)}
        print(json.dumps(facts, indent=2))
        return int(not found.ok)
    for note in found.notes:
        print(f"note: {note}")
    if found.ok:
        print(
            f"the ledger of {run.name} holds: {found.rounds} rounds, {found.entries} updates, {found.signed} of them "
            f"signed by {len(found.keys)} sites, {found.kept} compared with the kept bytes"
        )
        return 0
    print(f"BROKEN: {found.broken}")
    return 1


def leave_one_out(run: Path, data: str) -> int:
    """Compute what the held-out loss would be without each site; a process of the server's own room does it."""
    command = [sys.executable, "-m", "server_app.leave_one_out", str(run)]
    return subprocess.call([*command, "--data", data] if data else command)
