"""What each site gave to a run, as rows: from the events, the ledger, and the leave-one-out file where there is one.

`loss_change` of a site = held-out loss of the final state without its updates - that with them: positive means that
the site helped on the rows that were scored. It is one number about one held-out set, not a price.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from umbel.ledger import chain
from umbel.ledger.book import FILE, standing
from umbel.telemetry.history import History

LEAVE_ONE_OUT = "leave_one_out.json"


def contributions(run: Path) -> list[dict[str, Any]]:
    """Return one row a site, by name: rounds, steps, tokens, share of tokens, bytes, signatures, loss change."""
    history = History.read(run / "events.jsonl")
    changes = leave_one_out(run)
    signed: dict[str, list[str]] = {}
    steps: dict[str, int] = {}
    for line in standing(chain.records(run / FILE)):
        for entry in line.get("entries", []):
            steps[entry["site"]] = steps.get(entry["site"], 0) + int(entry.get("steps", 0))
            if "manifest" in entry:
                signed.setdefault(entry["site"], []).append(str(entry["manifest"].get("key", "")))
    given, total = history.contributions(), history.tokens()
    rows = []
    for name in sorted(history.sites):
        site, (rounds, tokens) = history.sites[name], given.get(name, (0, 0))
        row = {"site": name, "rounds": rounds, "steps": steps.get(name, 0), "tokens": tokens}
        row |= {
            "share": tokens / total if total else 0.0,
            "bytes_up": site.bytes_up,
            "bytes_down": site.bytes_down,
        }
        keys = signed.get(name, [])
        row |= {"signed": len(keys), "key": keys[-1] if keys else None}
        rows.append(row | {"loss_change": changes.get("sites", {}).get(name)})
    return rows


def leave_one_out(run: Path) -> dict[str, Any]:
    """Return the kept result of the leave-one-out computation; {} when there is none or it cannot be read."""
    try:
        found = json.loads((run / LEAVE_ONE_OUT).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("sites"), dict) else {}
