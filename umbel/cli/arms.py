"""The two baselines of a comparison: every site alone, and all rows in one place.

    local         one run a site on its own training rows; as many steps as the site takes in the federation
    centralised   one run on the pooled training rows; the steps of all sites together

Both are one-site simulations of the same recipe with plain averaging, which of one site is that site's training. The
rows are written to the comparison's folder: what a site holds out there is in no training file, and all arms are scored
on the union of what the sites hold out, by the server (`eval.central-data`). For sites that are simulated here only: a
real federation's rows cannot be pooled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umbel.config import Config, resolve

ARMS = ("local", "centralised")


def arm_configurations(
    arm: str, recipe: Any, overrides: Sequence[str], seed: int, folder: Path
) -> list[tuple[str, int, Config]]:
    """Return (arm, seed, configuration) of the runs of one arm and seed; writes the rows they train on.

    Raises DataError when the recipe's data cannot be read here.
    """
    federated = resolve(recipe, [*overrides, f"run.seed={seed}"])
    data = folder / "rows" / f"seed-{seed}"
    names = write_rows(federated, data)
    runs = names if arm == "local" else ["pool"]
    steps = federated.train.local_steps * (1 if arm == "local" else len(names))
    found = []
    for name in runs:
        run = f"{arm}-{seed}" + (f"-{name}" if arm == "local" else "")
        own = [
            "run.method=fedit" if federated.train.mode == "lora" else "run.method=fedavg",
            f"run.seed={seed}",
            f"run.name={run}",
            f"run.output-dir={folder / run}",
            f"train.local-steps={steps}",
            f"data.source={data / name}",
            "data.partition=file",
            "data.heldout-fraction=0",
            "data.heldout-max=0",
            "data.limit=0",
            f"eval.central-data={data / 'heldout.jsonl'}",
            f"eval.every={federated.run.rounds}",
            "eval.final=false",
            "simulation.sites=1",
            "clients.minimum=1",
            "clients.goal=0",
            "clients.quorum=0",
            "clients.merge=mean",
            "lora.site-ranks=",
            "server.optimizer=none",
            "compression.up=exact",
            "compression.down=exact",
            "compression.feedback=0",
            "privacy.clip-norm=0",
            "privacy.noise-multiplier=0",
        ]
        found.append((arm, seed, resolve(recipe, [*overrides, *own])))
    return found


def write_rows(config: Config, folder: Path) -> list[str]:
    """Write SITE/SITE.jsonl and pool/pool.jsonl (training rows) and heldout.jsonl; returns the sites' names.

    A file alone in a folder gives its name to the site that reads it: the order of rows is drawn from that name, so a
    site alone sees the batches that it sees in the federation.
    """
    from umbel.data.shares import assign, rows_of_share
    from umbel.data.split import heldout_split

    d, count = config.data, config.simulation.sites
    names, pool, heldout = [], [], []
    for index in range(count):
        name, source, share, scheme = assign(d.source, d.partition, index, count)
        rows = rows_of_share(source, share, scheme, config)
        train, held = heldout_split(rows, d.heldout_fraction, max_heldout=d.heldout_max)
        names.append(name)
        pool += [rows[i] for i in train]
        heldout += [rows[i] for i in held]
        _write(folder / name / f"{name}.jsonl", [rows[i] for i in train])
    _write(folder / "pool" / "pool.jsonl", pool)
    _write(folder / "heldout.jsonl", heldout)
    return names


def _write(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")


def one_row_a_seed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a comparison with the local runs of a seed joined: mean losses, summed tokens and seconds.

    An arm that exchanges nothing has no bytes and no exactness.
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        if row["method"] not in ARMS:
            found.append(row)
            continue
        row = {**row, "bytes_up": None, "bytes_down": None, "exactness_relative_error": None}
        known = next((r for r in found if (r["method"], r["seed"]) == (row["method"], row["seed"])), None)
        if known is None:
            found.append({**row, "runs": 1})
            continue
        if row.get("outcome") != "completed":
            known["outcome"] = row.get("outcome")
        n = known["runs"]
        for key in ("heldout_loss_first", "heldout_loss_last"):
            if known.get(key) is not None and row.get(key) is not None:
                known[key] = (n * known[key] + row[key]) / (n + 1)
        known["curve"] = [
            {
                **p,
                "loss": (n * p["loss"] + q["loss"]) / (n + 1),
                **{k: p[k] + q[k] for k in ("bytes", "tokens", "seconds")},
            }
            for p, q in zip(known.get("curve") or (), row.get("curve") or (), strict=False)
            if p["round"] == q["round"]
        ]
        for key in ("tokens", "elapsed_seconds"):
            known[key] = (known.get(key) or 0) + (row.get(key) or 0)
        known["runs"] = n + 1
    return found
