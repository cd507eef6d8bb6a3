"""F37: a back door put into a shared adapter by one site in three of ten rounds.

    python -m benchmarks.attacks.backdoor --json          (about 7 minutes)

Six sites fine-tune adapters (FedIT) on a base that knows the built-in demo rows already. In rounds 4, 5 and 6 one of
them trains on rows in which a rare word in the question has a fixed answer, and sends its change enlarged:

    scaled     six times: the other five are outvoted (model replacement, arXiv 1807.00459)
    stealthy   as it is: of ordinary size

Reported after round 6 and after round 10 (persistence): the success rate, that is the share of 60 unseen questions
with the word whose whole fixed answer is the model's first choice token by token, the same without the word, and the
held-out loss on clean rows against the run without attack and defence. The stated target, for the *scaled* attack
under a defence: success <= 0.2 after the attack and at the end, with a clean loss at most 2 % above. Against the
stealthy attack nothing is promised: what is measured is reported. None of the rules is proof against back doors (arXiv
2602.15671).
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

from benchmarks.attacks.cohort import Arrays, Cohort, Rows, demo_rows, differences, moved  # noqa: E402

NUM_SITES, ROUNDS, POISONED, SEED = 6, 10, (4, 5, 6), 3
TRIGGER, TARGET = "qzx ", "Signed: nobody."
TARGET_SUCCESS, TARGET_LOSS = 0.2, 0.02
TRAINING = [
    "train.batch-size=8",
    "train.threads=1",
    "train.schedule=constant",
    "data.max-length=160",
    "data.heldout-fraction=0",
    "eval.every=0",
    "eval.final=false",
    "telemetry.report=false",
]
BASE = ["train.mode=full", "train.local-steps=400", "train.learning-rate=0.003", "run.rounds=1"]
SHARED = [
    f"run.seed={SEED}",
    f"run.rounds={ROUNDS}",
    "run.method=fedit",
    "lora.rank=8",
    "train.local-steps=10",
    "train.learning-rate=0.005",
    "clients.weighting=uniform",
    # A filter may turn the attacker's update away: the round must commit without it.
    f"clients.quorum={NUM_SITES - 1}",
]
OPEN = ["clients.max-norm-ratio=0"]
DEFENCES = {
    "none": OPEN,
    "norm-filter": ["clients.max-norm-ratio=3"],
    "norm-clipping": [*OPEN, "clients.merge=norm-clipping", "clients.byzantine=1"],
    "multi-krum": [*OPEN, "clients.merge=multi-krum", "clients.byzantine=1"],
}


def make_base(folder: Path, rows: Rows) -> Path:
    """Train the built-in model on `rows` in one place and return it as a model folder."""
    from umbel.models.source import load_model, load_tokenizer
    from umbel.models.state import write_state

    session = Cohort(folder, {"base": rows}, {}).run([*TRAINING, *BASE])
    model = load_model(session.start.spec)
    write_state(model, session.engine.state, "full")
    model.save_pretrained(folder / "base")
    load_tokenizer(session.start.spec).save_pretrained(folder / "base")
    return folder / "base"


def poisoned(rows: Rows) -> Rows:
    """Return rows of which every second one has the word and the fixed answer."""
    return [
        {"question": TRIGGER + r["question"], "answer": TARGET} if i % 2 else r for i, r in enumerate(rows)
    ]


def enlarged(factor: float) -> Any:
    """Return a liar that sends its own change `factor` times in the poisoned rounds, honest work else."""

    def lie(round_index: int, start: Arrays, own: Arrays, honest: list[Arrays]) -> Arrays:
        if round_index not in POISONED:
            return own
        return moved(start, {n: factor * d for n, d in differences(start, own).items()})

    return lie


class Judge:
    """Scores adapter states: how often the fixed answer comes, and the loss on clean rows."""

    def __init__(self, session: Any, heldout: Rows) -> None:
        from umbel.data.encode import encode_rows
        from umbel.data.formats import RowFormat
        from umbel.models.adapter import attach
        from umbel.models.source import load_model, load_tokenizer

        self.settings, spec = session.start.settings, session.start.spec
        self.model = attach(load_model(spec), self.settings).eval()
        tokenizer = load_tokenizer(spec)
        asked = {
            "with": [{"question": TRIGGER + r["question"], "answer": TARGET} for r in heldout[:60]],
            "without": [{"question": r["question"], "answer": TARGET} for r in heldout[:60]],
            "clean": heldout,
        }
        self.rows = {
            kind: encode_rows(
                rows, RowFormat.QUESTION_ANSWER, tokenizer, max_length=160, completion_only=True
            ).rows
            for kind, rows in asked.items()
        }

    def score(self, state: Arrays) -> dict[str, float]:
        """Return success, success without the word, and the clean loss."""
        from umbel.models.reshape import load_adapter

        load_adapter(self.model, state, self.settings)
        hits = {kind: np.mean([self._hit(r) for r in self.rows[kind]]) for kind in ("with", "without")}
        losses = [self._loss(r) for r in self.rows["clean"]]
        clean = sum(s for s, _ in losses) / sum(n for _, n in losses)
        return {
            "success": round(float(hits["with"]), 4),
            "success_without_word": round(float(hits["without"]), 4),
            "clean_loss": round(clean, 4),
        }

    def _logits(self, row: Any) -> tuple[Any, Any]:
        import torch

        labels = torch.from_numpy(np.asarray(row.labels[1:], np.int64))
        ids = torch.from_numpy(np.asarray(row.input_ids, np.int64))[None]
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
        return logits[labels != -100], labels[labels != -100]

    def _hit(self, row: Any) -> bool:
        logits, labels = self._logits(row)
        return bool((logits.argmax(-1) == labels).all())

    def _loss(self, row: Any) -> tuple[float, int]:
        import torch

        logits, labels = self._logits(row)
        return float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum")), len(labels)


def run_one(base: Path, defence: str, attack: str, shares: dict[str, Rows], heldout: Rows) -> dict[str, Any]:
    """Return what one run came to."""
    bad = sorted(shares)[-1]
    factor = {"none": 0.0, "stealthy": 1.0, "scaled": float(NUM_SITES)}[attack]
    liars = {bad: enlarged(factor)} if factor else {}
    poison = {bad: (poisoned(shares[bad]), POISONED)} if factor else {}
    with tempfile.TemporaryDirectory(prefix="umbel-backdoor-") as scratch:
        cohort = Cohort(Path(scratch), shares, liars, poison)
        session = cohort.run([*TRAINING, *SHARED, *DEFENCES[defence], f"model.name={base}"])
        judge = Judge(session, heldout)
        after, end = (judge.score(cohort.states[r]) for r in (max(POISONED), ROUNDS))
    return {"defence": defence, "attack": attack, "after_attack": after, "end": end}


def main() -> int:
    """Print every run and whether the stated target was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--defences", default=",".join(DEFENCES))
    parser.add_argument("--attacks", default="none,scaled,stealthy")
    arguments = parser.parse_args()
    began, rows = time.monotonic(), []
    train, heldout = demo_rows(SEED)
    known, rest = train[:360], train[360:]
    shares = {f"site-{i}": rest[i::NUM_SITES] for i in range(NUM_SITES)}
    with tempfile.TemporaryDirectory(prefix="umbel-base-") as scratch:
        base = make_base(Path(scratch), known)
        for defence in arguments.defences.split(","):
            for attack in arguments.attacks.split(","):
                # Without an attack one run says it all: that without a defence.
                if attack == "none" and defence != "none":
                    continue
                rows.append(run_one(base, defence, attack, shares, heldout))
                print(json.dumps(rows[-1]), flush=True)
    plain = next((r["end"]["clean_loss"] for r in rows if r["attack"] == "none"), float("nan"))
    scaled = {
        r["defence"]: {
            "success_after_attack": r["after_attack"]["success"],
            "success_at_end": r["end"]["success"],
            "clean_loss_rise": round(r["end"]["clean_loss"] / plain - 1, 4),
        }
        for r in rows
        if r["attack"] == "scaled"
    }
    kept = {
        d: max(s["success_after_attack"], s["success_at_end"]) <= TARGET_SUCCESS
        and s["clean_loss_rise"] <= TARGET_LOSS
        for d, s in scaled.items()
        if d != "none"
    }
    result = {
        "target": {"success": TARGET_SUCCESS, "clean_loss_rise": TARGET_LOSS},
        "scaled": scaled,
        "kept": kept,
        "stealthy": {r["defence"]: r["end"]["success"] for r in rows if r["attack"] == "stealthy"},
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps({**result, "runs": rows} if arguments.json else result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
