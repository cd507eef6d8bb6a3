"""F36: what hostile sites do to the model under each merge rule.

    python -m benchmarks.attacks.robustness --json             seven sites, two of them hostile (about 8 minutes)
    python -m benchmarks.attacks.robustness --rules mean,multi-krum --attacks ipm --json

Seven sites share the built-in demo rows evenly and train the whole built-in tiny model; f of them send

    sign-flip   g - 4 (x - g)                       its own work turned round and enlarged
    alie        mean - 1.5 deviation                of the honest changes, by coordinate (arXiv 1902.06156)
    ipm         g - 2 mean                          of the honest changes (arXiv 1903.03936)
    label-flip  honest work on rows whose answers are those of other questions

Liars know what the honest sites send in the same round. Reported for each rule and attack: the held-out loss of the
final model on rows that no site has, and its distance from the same rule without liars. The bound x that a rule must
keep for f within its bound is stated below (`WITHIN`) and was fixed from a run of this script. Below the bound on n a
rule is an error before the run begins; that is checked too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402

from benchmarks.attacks.cohort import Arrays, Cohort, Liar, Rows, demo_rows, differences, moved  # noqa: E402

NUM_SITES, NUM_LIARS, ROUNDS, SEED = 7, 2, 12, 5
ATTACKS = ("sign-flip", "alie", "ipm", "label-flip")
RULES = (
    "mean",
    "coordinate-median",
    "trimmed-mean",
    "multi-krum",
    "geometric-median",
    "centred-clipping",
    "norm-clipping",
)
# x: the largest relative rise of the final loss over that of the same rule without liars. Clipping alone bounds how
# long a liar's change is, not where it points.
WITHIN = {rule: 0.35 if rule.endswith("clipping") else 0.20 for rule in RULES if rule != "mean"}
SETTINGS = [
    f"run.seed={SEED}",
    "train.mode=full",
    "train.local-steps=3",
    "train.batch-size=8",
    "train.learning-rate=0.003",
    "train.schedule=constant",
    "train.threads=1",
    "data.max-length=96",
    "data.heldout-fraction=0",
    "clients.weighting=uniform",
    "clients.max-norm-ratio=0",
    f"clients.quorum={NUM_SITES}",
    "eval.every=0",
    "eval.final=false",
    "telemetry.report=false",
]


def sign_flip(round_index: int, start: Arrays, own: Arrays, honest: list[Arrays]) -> Arrays:
    """Return the own change turned round, four times as long."""
    return moved(start, {n: -4.0 * d for n, d in differences(start, own).items()})


def alie(round_index: int, start: Arrays, own: Arrays, honest: list[Arrays]) -> Arrays:
    """Return a point 1.5 deviations from the honest mean, by coordinate."""
    deltas = [differences(start, h) for h in honest]
    stacked = {n: np.stack([d[n] for d in deltas]) for n in start}
    return moved(start, {n: s.mean(0) - 1.5 * s.std(0) for n, s in stacked.items()})


def ipm(round_index: int, start: Arrays, own: Arrays, honest: list[Arrays]) -> Arrays:
    """Return twice the honest mean with the opposite sign: inner-product manipulation."""
    deltas = [differences(start, h) for h in honest]
    return moved(start, {n: -2.0 * np.mean([d[n] for d in deltas], axis=0) for n in start})


LIARS: dict[str, Liar] = {"sign-flip": sign_flip, "alie": alie, "ipm": ipm}


def flipped(rows: Rows) -> Rows:
    """Return the rows with the answers moved on by half their number."""
    half = len(rows) // 2
    return [{**row, "answer": rows[(i + half) % len(rows)]["answer"]} for i, row in enumerate(rows)]


def loss_of(rule: str, attack: str, num_liars: int) -> float:
    """Return the final held-out loss of one run."""
    train, heldout = demo_rows(SEED)
    names = [f"site-{i}" for i in range(NUM_SITES)]
    shares = {name: train[i::NUM_SITES] for i, name in enumerate(names)}
    bad = names[-num_liars:] if num_liars else []
    if attack == "label-flip":
        shares |= {name: flipped(shares[name]) for name in bad}
    liars = dict.fromkeys(bad, LIARS[attack]) if attack in LIARS else {}
    with tempfile.TemporaryDirectory(prefix="umbel-attack-") as scratch:
        folder = Path(scratch)
        from benchmarks.attacks.cohort import write_rows

        central = write_rows(folder / "heldout.jsonl", heldout)
        settings = [
            *SETTINGS,
            f"run.rounds={ROUNDS}",
            f"clients.merge={rule}",
            f"clients.byzantine={0 if rule == 'mean' else NUM_LIARS}",
            f"eval.central-data={central}",
        ]
        session = Cohort(folder, shares, liars).run(settings)
        return session.history.heldout_curve("server")[-1][1]


def refused_below_the_bound(rule: str) -> bool:
    """Return whether one site too few for f liars is refused before the run."""
    from umbel.config import resolve
    from umbel.config.check import fewest_updates
    from umbel.errors import ConfigError

    few = fewest_updates(rule, NUM_LIARS) - 1
    settings = [f"clients.merge={rule}", f"clients.byzantine={NUM_LIARS}", f"clients.minimum={few}"]
    try:
        resolve(None, [*settings, f"clients.quorum={few}"])
    except ConfigError:
        return True
    return False


def main() -> int:
    """Print every run and whether each rule kept its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    arguments = parser.parse_args()
    rules, attacks = arguments.rules.split(","), arguments.attacks.split(",")
    began, rows = time.monotonic(), []
    for rule in rules:
        clean = loss_of(rule, "none", 0)
        rows.append({"rule": rule, "attack": "none", "liars": 0, "loss": round(clean, 4)})
        print(json.dumps(rows[-1]), flush=True)
        for attack in attacks:
            found = loss_of(rule, attack, NUM_LIARS)
            rise = found / clean - 1
            rows.append(
                {
                    "rule": rule,
                    "attack": attack,
                    "liars": NUM_LIARS,
                    "loss": round(found, 4),
                    "relative_rise": round(rise, 4),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    robust = [r for r in rows if r["rule"] != "mean" and r["liars"]]
    worst = {
        rule: max(r["relative_rise"] for r in robust if r["rule"] == rule) for rule in rules if rule != "mean"
    }
    refused = {rule: refused_below_the_bound(rule) for rule in rules if rule != "mean"}
    result: dict[str, Any] = {
        "sites": NUM_SITES,
        "liars": NUM_LIARS,
        "rounds": ROUNDS,
        "within": WITHIN,
        "worst_relative_rise": worst,
        "refused_below_bound": refused,
        "kept": {rule: value <= WITHIN[rule] for rule, value in worst.items()},
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps({**result, "runs": rows} if arguments.json else result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
