"""What left this site, from its own records: `umbel inspect`. Reads files; shows no row of data and no value.

The last update is read from the bytes that were sent (`last.frame`): names, shapes, dtypes, how many bytes each codec
section took, and the norm of every tensor as the server will decode it. A record chain that was touched is said so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from client_app.gate import audit_text
from client_app.identity import default_state_dir
from client_app.sent import kept_layout
from umbel.ledger import chain
from umbel.telemetry.units import DASH, count, loss, moment, one_line, size


def sent_files(root: Path, run: str = "", site: str = "") -> list[Path]:
    """Return the records under a state folder, the most recently written last."""
    found = [
        path
        for path in root.glob("*/*/sent.jsonl")
        if (not run or path.parents[1].name == run) and (not site or path.parent.name == site)
    ]
    return sorted(found, key=lambda path: (path.stat().st_mtime, str(path)))


def tensors_of(folder: Path) -> dict[str, Any]:
    """Return what `last.frame` holds: digest, codec, sections and one entry a tensor; {} when it was not kept."""
    import numpy as np

    import compression
    from compression.frame import read_header

    try:
        frame = (folder / "last.frame").read_bytes()
    except FileNotFoundError:
        return {}
    header = read_header(frame)
    sections = [{"codec": g.spec, "sections": dict(g.sections)} for g in header.groups]
    found: dict[str, Any] = {
        "frame": hashlib.sha256(frame).hexdigest(),
        "bytes": len(frame),
        "codec": header.policy,
        "numbers": header.numel,
        "groups": sections,
        "tensors": None,
    }
    layout = kept_layout(folder, header.layout_digest)
    if layout is not None:
        values = compression.decode(frame, layout)
        found["tensors"] = [
            {
                "name": entry.name,
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "bytes": entry.num_bytes,
                "norm": float(np.linalg.norm(np.asarray(values[entry.name], np.float64))),
            }
            for entry in layout.entries
        ]
    return found


def describe(path: Path) -> dict[str, Any]:
    """Return everything about one site's record of one run; `broken` names a line that was touched."""
    lines = chain.records(path)
    return {
        "run": path.parents[1].name,
        "site": path.parent.name,
        "broken": chain.first_break(path),
        "answers": lines,
        "last_update": tensors_of(path.parent),
    }


def render(found: dict[str, Any], last: int) -> str:
    """Return the text for people: the last answers and the last update, tensor by tensor."""
    lines = [f"site {found['site']}, run {found['run']}: {len(found['answers'])} answers left this site"]
    if found["broken"]:
        lines.append(f"THE RECORD WAS TOUCHED: {found['broken']}")
    for a in found["answers"][-last:]:
        what = f"{moment(a.get('t'))}  {a['kind']:<10} round {a['round']}.{a['attempt']}  {a['status']}"
        if "bytes" in a:
            what += f"  {size(a['bytes'])} ({a['bytes']} bytes), {count(a.get('tokens'))} tokens"
            what += f", loss {loss(a.get('loss'))}, codec {a['codec']}"
        if a.get("reason"):
            what += f"  {a['reason']}"
        lines.append(what)
        names = ", ".join(sorted(a.get("metrics") or {}))
        lines.append(f"    metrics: {names or 'none'}")
    update = found["last_update"]
    if update:
        lines.append(
            f"last update: {update['bytes']} bytes, sha256 {update['frame'][:16]}, codec {update['codec']}"
        )
        if update["tensors"] is None:
            lines.append(f"    {count(update['numbers'])} numbers; their names were not kept")
        for t in update["tensors"] or []:
            shape = "x".join(str(n) for n in t["shape"]) or "1"
            lines.append(
                f"    {t['name']:<60} {shape:>14} {t['dtype']:<9} {t['bytes']:>12} B  |x| {t['norm']:.4g}"
            )
        if update["tensors"]:
            raw = sum(t["bytes"] for t in update["tensors"])
            lines.append(
                f"    {len(update['tensors'])} tensors, {raw} bytes before the codec, {update['bytes']} sent"
            )
    else:
        lines.append(f"no update was kept {DASH}")
    return "\n".join(one_line(line) for line in lines)


def show_audit(root: Path, site: str) -> int:
    """Print the audit logs of a state folder; 1 when one was touched."""
    code = 0
    for path in sorted(root.glob(f"{site or '*'}.audit.jsonl")):
        print(path.name.removesuffix(".audit.jsonl"))
        broken = chain.first_break(path)
        if broken:
            print(f"  THE LOG WAS TOUCHED: {broken}")
            code = 1
        for record in chain.records(path):
            print(f"  {one_line(audit_text(record))}")
    return code


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0, or 1 when a record was touched, or 65 when there is none."""
    parser = argparse.ArgumentParser(prog="umbel inspect", description="What left this site.")
    parser.add_argument("state_dir", nargs="?", default=str(default_state_dir()))
    parser.add_argument("--run", default="")
    parser.add_argument("--site", default="")
    parser.add_argument("--last", type=int, default=3, help="answers shown")
    parser.add_argument("--audit", action="store_true", help="what the site's policy decided")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    root = Path(given.state_dir).expanduser()
    if given.audit:
        return show_audit(root, given.site)
    files = sent_files(root, given.run, given.site)
    if not files:
        print(f"error: nothing has left this site yet, or {root} is not its state folder.", file=sys.stderr)
        return 65
    found = describe(files[-1])
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print(render(found, max(1, given.last)))
    return int(bool(found["broken"]))


if __name__ == "__main__":
    sys.exit(main())
