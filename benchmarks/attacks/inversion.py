"""F44: how much of a site's text can be read out of what it sends?

    python -m benchmarks.attacks.inversion --json          (about 2 minutes)

A curious server tries to name the tokens in one site's training rows. The attack is a simple one, so that what it
finds is a lower bound on what leaks:

    full model   score of token v = norm of the change of its input embedding (only rows that were read move)
    adapter      score of token v = norm of dB A x_v in the first layer, x_v the normed embedding of v

and its result is the area under the ROC curve over the vocabulary (1: every token that was there ranks above every
token that was not; 0.5: chance) and the F1 of the best cut, which the attacker would have to know. Arms, all with the
project's own local training and arithmetic:

    plain         one row, one step                         local-steps   eight rows, eight steps
    sum-of-8      the sum of eight sites, one is the target (what a secure sum shows)
    clip-noise    the private mean of the same eight, z = 1, n = 8, C = the median norm of the eight changes

"What was there" are the tokens of the target site. Averages over 20 targets. Sending adapters is not privacy:
published attacks read whole sentences out of gradients and adapters where this one only names bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402

from benchmarks.attacks.cohort import Arrays, demo_rows, differences  # noqa: E402

NUM_SITES, STEPS, NOISE, SEED = 8, 8, 1.0, 9
ARMS = ("plain", "local-steps", "sum-of-8", "clip-noise")


class Site:
    """Local training from one fixed start; a row list in, a change out."""

    def __init__(self, mode: str) -> None:
        from umbel.config import resolve
        from umbel.models.described import described
        from umbel.models.source import load_tokenizer

        learning = "0.003" if mode == "full" else "0.01"
        self.config = resolve(
            None,
            [
                f"train.mode={mode}",
                f"train.learning-rate={learning}",
                "train.batch-size=1",
                "train.schedule=constant",
                "train.threads=1",
                "data.max-length=160",
                "lora.target-modules=q_proj,k_proj,v_proj",
                f"run.seed={SEED}",
            ],
        )
        self.spec, self.settings = described(self.config)
        self.tokenizer = load_tokenizer(self.spec)

    def change(self, rows: list[dict[str, str]], steps: int) -> tuple[Arrays, Arrays, set[int]]:
        """Return (start, change, tokens that were read) of `steps` steps of one row each."""
        from client_app.clock import Clock
        from client_app.tasks.sft import train
        from umbel.data.cursor import Cursor
        from umbel.data.encode import encode_rows
        from umbel.data.formats import RowFormat
        from umbel.models.state import read_state

        model = self.model()
        start = {n: a.copy() for n, a in read_state(model, self.config.train.mode).items()}
        encoded = encode_rows(
            rows, RowFormat.QUESTION_ANSWER, self.tokenizer, max_length=160, completion_only=True
        ).rows
        result = train(
            model,
            encoded,
            self.config,
            Clock(1e6),
            site="target",
            round_index=1,
            first_step=0,
            total_steps=steps,
            cursor=Cursor(0, 0),
            moments={},
            precision="float32",
            max_tokens=2048,
            packing=False,
            local_steps=steps,
        )
        # The last token of a row is only ever predicted, never read.
        read = {int(t) for row in encoded for t in row.input_ids[:-1]}
        return start, differences(start, result.arrays), read

    def model(self) -> Any:
        """Return the model at the start of the round, with a fresh adapter where one is trained."""
        from umbel.models.adapter import adapted_modules, attach, initial_adapter
        from umbel.models.source import load_model
        from umbel.models.state import write_state

        model = load_model(self.spec)
        if self.config.train.mode == "lora":
            model = attach(model, self.settings)
            write_state(model, initial_adapter(adapted_modules(model), self.settings, SEED), "lora")
        return model

    def scores(self, start: Arrays, change: Arrays) -> np.ndarray:
        """Return one number a token of the vocabulary: the higher, the more likely it was there."""
        if self.config.train.mode == "full":
            name = next(n for n in change if "embed_tokens" in n)
            return np.linalg.norm(change[name], axis=1)
        from umbel.models.source import load_model

        base = load_model(self.spec)
        layer = base.model.layers[0]
        embedded = layer.input_layernorm(base.model.embed_tokens.weight).detach().double().numpy()
        total = np.zeros(len(embedded))
        for b in (n for n in change if ".0." in n and n.endswith(".lora_B.weight")):
            a = b.replace(".lora_B.", ".lora_A.")
            total += np.linalg.norm(embedded @ start[a].astype(np.float64).T @ change[b].T, axis=1) ** 2
        return np.sqrt(total)


def area(scores: np.ndarray, there: set[int]) -> float:
    """Return the area under the ROC curve; ties count half."""
    mask = np.zeros(len(scores), bool)
    mask[sorted(there)] = True
    wins = (scores[mask][:, None] > scores[~mask][None]).mean()
    return float(wins + 0.5 * (scores[mask][:, None] == scores[~mask][None]).mean())


def best_f1(scores: np.ndarray, there: set[int]) -> float:
    """Return the F1 of the best cut through the ranking."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(np.isin(order, sorted(there)))
    return float((2 * hits / (np.arange(1, len(order) + 1) + len(there))).max())


def released(start: Arrays, changes: list[Arrays]) -> Arrays:
    """Return what the private mean of these changes would move the state by, noise of the system included."""
    from compression import Layout
    from strategies import SiteUpdate, build
    from strategies.private_mean import PrivateMean
    from umbel.config import resolve
    from umbel.privacy.clip import change_norm
    from umbel.privacy.noise import system_normal

    values = [{n: start[n].astype(np.float64) + c[n] for n in start} for c in changes]
    bound = statistics.median(change_norm(v, start) for v in values)
    wide = {n: a.astype(np.float64) for n, a in start.items()}
    settings = [
        f"privacy.clip-norm={bound!r}",
        f"privacy.noise-multiplier={NOISE}",
        "clients.normalise=fixed",
        "clients.weighting=uniform",
        "clients.max-norm-ratio=0",
        "train.mode=full",
    ]
    strategy = build(resolve(None, settings), Layout.from_arrays(wide), {})
    outcome = PrivateMean(strategy).aggregate(
        wide,
        (SiteUpdate(f"s{i}", 1.0, v) for i, v in enumerate(values)),
        num_asked=len(values),
        before_release=lambda: system_normal,
    )
    return differences(wide, outcome.state)


def main() -> int:
    """Print the gauge for a full model and for an adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--targets", type=int, default=20)
    arguments = parser.parse_args()
    began, rows = time.monotonic(), demo_rows(SEED)[0]
    result: dict[str, Any] = {"vocabulary": 259, "targets": arguments.targets}
    for mode in ("full", "lora"):
        site = Site(mode)
        found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
        # The seven others are the same for every target: their changes are made once.
        others = [site.change(rows[400 + i * STEPS : 400 + (i + 1) * STEPS], STEPS)[1] for i in range(7)]
        for target in range(arguments.targets):
            mine = rows[target * STEPS : (target + 1) * STEPS]
            start, one, few = site.change(mine[:1], 1)
            _, many, tokens = site.change(mine, STEPS)
            total = {n: many[n] + sum(o[n] for o in others) for n in many}
            views = {
                "plain": (one, few),
                "local-steps": (many, tokens),
                "sum-of-8": (total, tokens),
                "clip-noise": (released(start, [many, *others]), tokens),
            }
            for arm, (view, there) in views.items():
                scores = site.scores(start, view)
                found[arm].append((area(scores, there), best_f1(scores, there)))
        result[mode] = {
            arm: {
                "area": round(statistics.fmean(a for a, _ in pairs), 4),
                "best_f1": round(statistics.fmean(f for _, f in pairs), 4),
            }
            for arm, pairs in found.items()
        }
        print(json.dumps({mode: result[mode]}), flush=True)
    result["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
