"""Pretraining on paper: parameters, bytes a round, chunks and memory, and from link and step the H for 95 % of work.

    U = H t / (H t + f (t_fixed + b_up / B + b_down / B))        H = ceil( U / (1 - U)  f (t_fixed + ..) / t )

t seconds a step, B the link of a site, t_fixed what a round costs without any bytes (polling, start of a process),
f = 1.5 because the plain formula was 1.1 to 1.9 times too kind wherever somebody measured. Bytes are those of
`server_app.byte_plan`, steady state (round 2). Nothing is loaded: shapes come from the meta device.

The advice is the least lossy pair of codecs whose H stays within 500, beyond which local training is known to drift
(DiLoCo, arXiv 2311.08105, used 500); where none does, the pair with the smallest H.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from umbel.cli.plan import with_real_frames
from umbel.config import Config, resolve
from umbel.telemetry import units

UTILISATION = 0.95
FIXED_SECONDS = 5.0
MARGIN = 1.5
LARGEST_H = 500
# Flower cuts an array into pieces of this size.
CHUNK_BYTES = 5 * 2**20
# (up, down, decay of the residual), least lossy first.
PAIRS = (
    ("exact", "exact", 0.0),
    ("bf16", "exact", 0.0),
    ("int8(256,rtn)", "int8(256,rtn)", 0.0),
    ("int4(64,rtn)", "int4(64,rtn)", 0.0),
    ("int2(256,rtn)", "int4(64,rtn)", 1.0),
    ("topk(4096,64)|sign2|rice", "int4(64,rtn)", 0.95),
)


def steps_for(num_bytes: float, link_mbit: float, step_seconds: float) -> int:
    """Return the fewest steps H a round that keep a site working 95 % of the time."""
    overhead = MARGIN * (FIXED_SECONDS + 8.0 * num_bytes / (link_mbit * 1e6))
    return max(1, math.ceil(UTILISATION / (1.0 - UTILISATION) * overhead / step_seconds - 1e-9))


def utilisation(steps: int, num_bytes: float, link_mbit: float, step_seconds: float) -> float:
    """Return U of `steps` a round."""
    work = steps * step_seconds
    return work / (work + MARGIN * (FIXED_SECONDS + 8.0 * num_bytes / (link_mbit * 1e6)))


def pretrain_plan(config: Config, *, link_mbit: float, step_seconds: float) -> dict[str, Any]:
    """Return the plan as plain data: the recipe's own sizes, one row a pair of codecs, and the advice."""
    own = dataclasses.replace(config, run=dataclasses.replace(config.run, rounds=2))
    configs = [own, *(_with_codec(own, *pair) for pair in PAIRS)]
    reports = with_real_frames(configs)
    rows = [_row(c, r, link_mbit, step_seconds) for c, r in zip(configs, reports, strict=True)]
    good = [row for row in rows[1:] if row["local_steps"] <= LARGEST_H]
    order = {pair[:2]: i for i, pair in enumerate(PAIRS)}
    best = min(
        good or rows[1:],
        key=lambda row: order[row["up"], row["down"]] if good else row["local_steps"],
    )
    first = reports[0]
    slots = {"adamw": 8, "muon": 8, "adamw8bit": 2}[config.train.optimizer]
    n = first["trainable_parameters"]
    return {
        "model": config.model.name,
        "parameters": n,
        "full_exchange_bytes": first["base_bytes"],
        "site_memory_bytes": (8 + slots) * n,
        "server_memory_bytes": first["server_memory_bytes"],
        "link_mbit": link_mbit,
        "step_seconds": step_seconds,
        "own": rows[0],
        "codecs": rows[1:],
        "advice": {key: best[key] for key in ("up", "down", "feedback", "local_steps", "utilisation")},
    }


def _with_codec(config: Config, up: str, down: str, feedback: float) -> Config:
    # Frames do not depend on the outer rule, whose own limits on codecs are the run's business.
    plain = dataclasses.replace(config.server, optimizer="none")
    codec = dataclasses.replace(config.compression, up=up, down=down, feedback=feedback)
    return dataclasses.replace(
        config, compression=codec, server=plain, run=dataclasses.replace(config.run, method="fedavg")
    )


def _row(config: Config, report: dict[str, Any], link_mbit: float, step_seconds: float) -> dict[str, Any]:
    entry = report["rounds"][-1]
    up, down = max(entry["up"].values()), max(entry["down"].values())
    steps = steps_for(up + down, link_mbit, step_seconds)
    return {
        "up": config.compression.up,
        "down": config.compression.down,
        "feedback": config.compression.feedback,
        "bytes_up": up,
        "bytes_down": down,
        "chunks_up": -(-up // CHUNK_BYTES),
        "chunks_down": -(-down // CHUNK_BYTES),
        "exact_bytes": report.get("exact_bytes", True),
        "local_steps": steps,
        "utilisation": utilisation(steps, up + down, link_mbit, step_seconds),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return a plan as text."""
    rows = [
        f"{found['model']}: {found['parameters']:,} parameters, {found['full_exchange_bytes']:,} bytes once over; memory "
        f"{units.size(found['site_memory_bytes'])} a site without activations, "
        f"{units.size(found['server_memory_bytes'])} at the server",
        f"a link of {found['link_mbit']:g} Mbit/s, {found['step_seconds']:g} s a step: H for 95 % of the time at work",
        f"  {'up':<26} {'down':<16} {'up a round':>10} {'down':>10} {'chunks':>7} {'H':>8}",
    ]
    rows += [
        f"  {row['up']:<26} {row['down']:<16} {units.size(row['bytes_up']):>10} "
        f"{units.size(row['bytes_down']):>10} {row['chunks_up'] + row['chunks_down']:>7} {row['local_steps']:>8}"
        for row in [found["own"], *found["codecs"]]
    ]
    advice = found["advice"]
    rows.append(
        f"advice: compression.up={advice['up']} compression.down={advice['down']} "
        f"compression.feedback={advice['feedback']:g} train.local-steps={advice['local_steps']}"
    )
    return rows


def plan_pretrain(
    recipe: Any,
    overrides: list[str] | None,
    *,
    link_mbit: float,
    step_seconds: float,
    as_json: bool,
    say: Any,
) -> int:
    """Print the plan of a pretraining recipe."""
    found = pretrain_plan(resolve(recipe, overrides or []), link_mbit=link_mbit, step_seconds=step_seconds)
    say(json.dumps(found) if as_json else "\n".join(lines(found)))
    return 0
