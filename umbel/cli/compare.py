"""Several methods on one recipe: same data, seeds, sites and local steps, one table.

Every method is run once a seed, each run in a folder of its own that stays; the table is computed from their event
logs. A method that takes several engine rounds for one of its own gets as many more (`umbel.methods.STAGES`), so
that all train on the same number of tokens; the table says how many those were. `local` and `centralised` among the
methods are the two baselines (`umbel.cli.arms`). With settings that disturb, every method runs once more a seed under
them. The three protocols (`umbel.cli.protocols`) and the picture are made from the same runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from umbel.cli.arms import ARMS, arm_configurations, one_row_a_seed
from umbel.cli.comparison_plot import plot
from umbel.cli.protocols import DISTURBED, curve, protocols, text
from umbel.config import Config, resolve
from umbel.config.schema import METHODS
from umbel.errors import ConfigError
from umbel.fsio import write_atomic
from umbel.methods import STAGES
from umbel.telemetry import units
from umbel.telemetry.history import History
from umbel.telemetry.runfolder import RunFolder
from umbel.telemetry.summary import summarise

# (key of the summary, heading, how it is shown)
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("heldout_loss_first", "held-out before", "{:.4f}".format),
    ("heldout_loss_last", "held-out after", "{:.4f}".format),
    ("tokens", "target tokens", "{:.0f}".format),
    ("bytes_up", "up", units.size),
    ("bytes_down", "down", units.size),
    ("elapsed_seconds", "seconds", "{:.1f}".format),
    ("exactness_relative_error", "worst error", "{:.1e}".format),
)


def configurations(
    recipe: Any,
    overrides: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    folder: Path,
    disturb: Sequence[str] = (),
) -> list[tuple[str, int, Config]]:
    """Return (method, seed, configuration) of every run; all are checked before the first one starts.

    With `disturb`, settings such as `data.partition=dirichlet`, each method (not the baselines) has a second run.
    """
    unknown = [m for m in methods if m not in (*METHODS, *ARMS)]
    if unknown or not methods:
        raise ConfigError(
            "--methods", "names no method", got=unknown or "nothing", allowed=", ".join((*METHODS, *ARMS))
        )
    plain = resolve(recipe, list(overrides))
    found = []
    for seed in range(plain.run.seed, plain.run.seed + seeds):
        for method in methods:
            if method in ARMS:
                found += arm_configurations(method, recipe, overrides, seed, folder)
                continue
            for more in [(), tuple(disturb)] if disturb else [()]:
                name = f"{method}-{seed}" + ("-disturbed" if more else "")
                own = [
                    f"run.method={method}",
                    f"run.seed={seed}",
                    f"run.rounds={plain.run.rounds * STAGES.get(method, 1)}",
                    f"run.name={name}",
                    f"run.output-dir={folder / name}",
                ]
                label = method + (DISTURBED if more else "")
                found.append((label, seed, resolve(recipe, [*overrides, *more, *own])))
    return found


def compare(
    planned: Sequence[tuple[str, int, Config]],
    run: Callable[[Config], int],
    folder: Path,
    *,
    say: Callable[[str], None],
    disturb: Sequence[str] = (),
    budget_bytes: float = 0,
    target_loss: float = 0,
) -> int:
    """Run everything and write the comparison; returns 1 when a run failed.

    `comparison.json` has a row a run, `comparison.md` the table, `protocols.json` and `protocols.md` what
    `umbel.cli.protocols` reads from them, `comparison.svg` the picture.
    A run whose folder holds a completed run of the same seed and method is not repeated.
    """
    rows: list[dict[str, Any]] = []
    for method, seed, config in planned:
        path = Path(config.run.output_dir)
        found = _read(path)
        if found.get("outcome") != "completed":
            say(f"{method}, seed {seed}")
            run(config)
            found = _read(path)
        if found.get("tokens"):
            # A second stage answers with the weight of the first and trains on nothing.
            found["tokens"] //= STAGES.get(config.run.method, 1)
        # An arm is run with a method of its own, but is not that method.
        rows.append({**found, "method": method, "seed": seed})
        folder.mkdir(parents=True, exist_ok=True)
        joined = one_row_a_seed(rows)
        write_atomic(folder / "comparison.json", json.dumps(joined, indent=1, default=str).encode())
        write_atomic(folder / "comparison.md", ("\n".join(table(joined)) + "\n").encode())
    joined = one_row_a_seed(rows)
    say("\n".join(table(joined)))
    read = protocols(joined, budget_bytes, target_loss)
    lines = text(read, disturb)
    write_atomic(folder / "protocols.json", json.dumps(read, indent=1).encode())
    write_atomic(folder / "protocols.md", ("\n".join(lines) + "\n").encode())
    say("\n".join(["", *lines]))
    if picture := plot(joined):
        write_atomic(folder / "comparison.svg", picture.encode())
    failed = [f"{r['method']}-{r['seed']}" for r in rows if r.get("outcome") != "completed"]
    if failed:
        say(f"not completed: {', '.join(failed)}")
    return 1 if failed else 0


def _read(path: Path) -> dict[str, Any]:
    if not (path / "events.jsonl").exists():
        return {}
    history = History.read(RunFolder.open(path).events_jsonl)
    found = summarise(history)
    found["curve"] = curve(history, STAGES.get(history.method, 1))
    central = history.heldout_curve("server")
    if central and found["heldout_loss_last"] is None:
        found |= {"heldout_loss_first": central[0][1], "heldout_loss_last": central[-1][1]}
    return found


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Markdown table: mean over the seeds, and the spread of the loss after."""
    head = ["method", "seeds", *(title for _, title, _ in COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for method in dict.fromkeys(r["method"] for r in rows):
        done = [r for r in rows if r["method"] == method and r.get("outcome") == "completed"]
        cells = [method, str(len(done))]
        for key, _, show in COLUMNS:
            values = [float(r[key]) for r in done if r.get(key) is not None]
            text = show(statistics.fmean(values)) if values else "-"
            if key == "heldout_loss_last" and len(values) > 1:
                text += f" +- {statistics.stdev(values):.4f}"
            cells.append(text)
        lines.append("| " + " | ".join(cells) + " |")
    return lines
