"""How much worse would the result be without one site? From the updates a run kept (`telemetry.keep-updates`).

    D_r(S)   = aggregate(state_{r-1}, updates of round r from the sites S) - state_{r-1}
    x(S)     = start + sum_r D_r(S)                                          x(all) = the final state
    change_i = loss(x(all without i)) - loss(x(all))        positive: the held-out loss is higher without site i

The other sites' updates are taken as they were: what they would have sent had site i been absent is not known. A
round that only site i took part in contributes nothing to x(without i). Works for methods whose state keeps its
tensors (plain averages of factors or weights); others are refused. `python -m server_app.leave_one_out RUN`
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import compression
from server_app import audit
from server_app.checker import commits
from server_app.evaluate import CentralEvaluation
from server_app.start import Start, prepare
from strategies import SiteUpdate, UmbelStrategy, build
from umbel.config import Config, resolve
from umbel.errors import ConfigError, DataError, UmbelError
from umbel.fsio import write_atomic
from umbel.ledger.contributions import LEAVE_ONE_OUT
from umbel.telemetry.events import scan_events

State = dict[str, np.ndarray]
# Methods whose committed state is the mean of what came up, in the same tensors.
LINEAR = ("fedavg", "fedit")


def kept_rounds(folder: Path, start: Start) -> list[tuple[str, list[SiteUpdate], float]]:
    """Return (state after, updates, expected weight) of every committed round that stands."""
    rounds = []
    for record in commits(scan_events(folder / "events.jsonl")[0]):
        kept = audit.round_folder(folder, record["round"], record["attempt"])
        if not (kept / "index.json").is_file():
            raise DataError(
                f"round {record['round']} has no kept updates. Run with --set telemetry.keep-updates=true."
            )
        index = json.loads((kept / "index.json").read_text("utf-8"))
        updates = [
            SiteUpdate(
                entry["key"].split("\x00")[0],
                entry["weight"],
                compression.decode((kept / f"{number:03d}.frame").read_bytes(), start.layout),
                int(accepted.get("tokens", 0)),
            )
            for number, (entry, accepted) in enumerate(zip(index, record["accepted"]))
        ]
        expected = float(np.mean([u.weight for u in updates])) * len(record["selected"])
        rounds.append((record["state_crc"], updates, expected))
    return rounds


def without(
    site: str, strategy: UmbelStrategy, first: State, rounds: list[tuple[str, list[SiteUpdate], float]]
) -> State:
    """Return x(all without `site`), in float64 and then the state's dtypes; `site` "" is nobody."""
    state, total = first, {n: a.astype(np.float64) for n, a in first.items() if a.dtype.kind == "f"}
    for _, updates, expected in rounds:
        base, everyone = state, iter(updates)
        state = strategy.aggregate(base, everyone, expected_weight=expected).state
        others = [u for u in updates if u.site != site]
        if not others:
            continue
        share = expected * len(others) / len(updates)
        moved = state if len(others) == len(updates) else strategy.aggregate(
            base, iter(others), expected_weight=share
        ).state  # fmt: skip
        for name in total:
            total[name] += moved[name].astype(np.float64) - base[name].astype(np.float64)
    return {n: total[n].astype(a.dtype) if n in total else a for n, a in state.items()}


def leave_one_out(folder: Path, data: str = "") -> dict[str, Any]:
    """Return {"loss", "rows", "sites": {site: change}} of a finished run; raises ConfigError or DataError in words."""
    config = resolve(folder / "config.toml")
    check(config, data)
    scored = dataclasses.replace(
        config, eval=dataclasses.replace(config.eval, central_data=data or config.eval.central_data)
    )
    start = prepare(config)
    first = compression.decode((folder / audit.FOLDER / "start.frame").read_bytes(), start.layout)
    rounds = kept_rounds(folder, start)
    if not rounds:
        raise DataError("the run has no committed round: there is nothing to leave out.")
    measure = CentralEvaluation(scored, start)

    def loss_without(site: str) -> float:
        # A fresh strategy each time: a server optimiser remembers.
        state = without(site, build(config, start.layout, start.scales), dict(first), rounds)
        return float((measure.score(state) or {"loss": float("nan")})["loss"])

    whole = loss_without("")
    names = sorted({u.site for _, updates, _ in rounds for u in updates})
    changes: Mapping[str, float] = {name: loss_without(name) - whole for name in names}
    return {
        "loss": whole,
        "rows": len(measure.rows),
        "sites": changes,
        "data": Path(data or config.eval.central_data).name,
    }


def check(config: Config, data: str) -> None:
    """Refuse what has no meaning: a method that is no mean, or nothing to score on."""
    if config.run.method not in LINEAR or config.server.optimizer != "none" or config.clients.merge != "mean":
        raise ConfigError(
            "run.method",
            "has no leave-one-out change that can be computed from kept updates",
            got=f"{config.run.method}, server.optimizer {config.server.optimizer}, clients.merge {config.clients.merge}",
            allowed=f"{' or '.join(LINEAR)} with server.optimizer = 'none' and clients.merge = 'mean'",
        )
    if not (data or config.eval.central_data):
        raise ConfigError(
            "eval.central-data",
            "is empty and no --data was given: there are no rows to score on",
            got="",
            allowed="a file of held-out rows on this machine",
            remedy="umbel ledger RUN --leave-one-out --data rows.jsonl",
        )


def main(arguments: list[str] | None = None) -> int:
    """Compute, print and keep the result in the run folder."""
    parser = argparse.ArgumentParser(prog="umbel ledger --leave-one-out")
    parser.add_argument("run")
    parser.add_argument("--data", default="")
    given = parser.parse_args(arguments)
    try:
        found = leave_one_out(Path(given.run), given.data)
    except UmbelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    write_atomic(Path(given.run) / LEAVE_ONE_OUT, json.dumps(found, indent=2).encode())
    print(f"held-out loss {found['loss']:.4f} on {found['rows']} rows of {found['data']}")
    for name, change in found["sites"].items():
        print(f"without {name}: {change:+.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
