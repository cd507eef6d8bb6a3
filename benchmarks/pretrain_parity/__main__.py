"""Loss against traffic at equal tokens: data-parallel training, one site alone, and outer rules with codecs.

    python -m benchmarks.pretrain_parity                 run what the log lacks, then print the table
    python -m benchmarks.pretrain_parity --table         print the table of the log
    python -m benchmarks.pretrain_parity --tune          the choice of rates and momenta, on the tuning split

Every arm and seed is one line of a JSONL log; what is there is not run again. README.md says what is compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.pretrain_parity.arms import ARMS, TUNE, TUNE_SEED
from benchmarks.pretrain_parity.federation import Arm, Warm, cold_start, run_arm, warm_up
from benchmarks.pretrain_parity.model import Corpus
from benchmarks.pretrain_parity.table import curve, render

HERE = Path(__file__).resolve().parent
SEEDS = (1, 2, 3)


def read(path: Path) -> list[dict]:
    """Return the lines of a log; none where it does not exist."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    first: dict[tuple[str, int], dict] = {}
    for row in map(json.loads, lines):
        first.setdefault((row["arm"], row["seed"]), row)
    return list(first.values())


def run_missing(arms: Iterable[Arm], seeds: Iterable[int], log: Path) -> None:
    """Run every (arm, seed) that the log lacks, appending a line each."""
    import torch

    torch.set_num_threads(1)
    corpus = Corpus.read()
    for seed in seeds:
        known = {(row["arm"], row["seed"]) for row in read(log)}
        missing = [arm for arm in arms if (arm.name, seed) not in known]
        starts: dict[bool, Warm] = {}
        for arm in missing:
            if arm.cold not in starts:
                starts[arm.cold] = cold_start(seed) if arm.cold else warm_up(corpus, seed)
            result = run_arm(arm, corpus, seed, starts[arm.cold])
            row = {**asdict(result), "settings": list(arm.settings), "rate": arm.rate, "period": arm.period}
            with log.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(row, sort_keys=True) + "\n")
            print(
                f"seed {seed} {arm.name}: held-out {result.heldout:.4f}, {result.seconds:.0f} s", flush=True
            )


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table only")
    parser.add_argument("--tune", action="store_true", help="run the tuning grid")
    parser.add_argument("--only", nargs="*", help="names of arms; all others are left out")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--log", type=Path, default=HERE / "log.jsonl")
    options = parser.parse_args()
    if options.tune:
        arms = [arm for arm in TUNE if not options.only or arm.name in options.only]
        run_missing(arms, [TUNE_SEED], HERE / "tune.jsonl")
        for row in sorted(read(HERE / "tune.jsonl"), key=lambda r: r["tune"]):
            print(f"{row['tune']:.4f}  {row['arm']}")
        return 0
    if not options.table:
        arms = [arm for arm in ARMS if not options.only or arm.name in options.only]
        run_missing(arms, options.seeds, options.log)
    rows = read(options.log)
    print(render(rows))
    curve(rows, options.log.with_name("curve.svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
