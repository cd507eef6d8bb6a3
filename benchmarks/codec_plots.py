"""Pictures of the codecs: distortion against bits on real updates, and throughput.

    python -m benchmarks.codec_plots --json [--rates FILE]

The updates are those of our own runs (`benchmarks.compression_quality.collect`): pseudo-gradients of the tiny
pretraining, changes of LoRA factors of the tiny fine-tuning, one site, the last of four rounds. Every codec sees
exactly the same vectors, without residual. They live in memory and in a temporary folder; only the pictures and the
numbers are kept, in `benchmarks/codecs/`. `--rates` is the log of a `benchmarks.codecs --json` run: its last line is
drawn as throughput. Speeds are not measured here. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.codec_svg import Point, bars, scatter
from benchmarks.compression_quality.collect import large_tensors, updates
from compression import Layout, Role, TensorSpec, decode, encode

FOLDER = Path(__file__).parent / "codecs"
ROUNDS = 4
# name on the plot: policy. The same in every set, so that the sets can be compared.
CODECS = {
    "bf16": "bf16",
    "int8": "int8(256,rtn)",
    "int8 sr": "int8(256,sr)",
    "int8/64": "int8(64,rtn)",
    "int8cb": "int8cb",
    "int4": "int4(64,rtn)",
    "int4 sr": "int4(64,sr)",
    "int2": "int2(256,rtn)",
    "sign": "sign(4096)",
    "had lm1": "had(4096)|lm1",
    "had lm2": "had(4096)|lm2",
    "had lm3": "had(4096)|lm3",
    "had lm4": "had(4096)|lm4",
    "top 1/64": "topk(4096,64)|sign2|rice",
    "top 1/32": "topk(4096,128)|sign2|rice",
    "top 1/8": "topk(4096,512)|sign2|rice",
    "dct top 1/64": "dct(64)|topk(4096,64)|sign2|rice",
    "ecsq .25": "ecsq(rate=0.25)",
    "ecsq .5": "ecsq(rate=0.5)",
    "ecsq 1": "ecsq(rate=1.0)",
    "ecsq 2": "ecsq(rate=2.0)",
    "ecsq 3": "ecsq(rate=3.0)",
    "ecsq 4": "ecsq(rate=4.0)",
    "ecsq 6": "ecsq(rate=6.0)",
    "randk 1/8": "randk(0.125)",
}
SETS = {"pretrain": "pseudo-gradient of pretraining", "lora": "change of LoRA factors"}
# Rows of the throughput picture: key of the codec benchmark, name.
RATES = {
    "int8": "int8(256) nearest",
    "int8_sr": "int8(256) stochastic",
    "int4": "int4(64)",
    "int2": "int2(256)",
    "four_bit": "ecsq, 4 bits",
    "two_bit": "ecsq, 2 bits",
    "one_bit": "ecsq, 1 bit",
    "one_bit_sign": "sign(4096)",
    "one_bit_rotation": "had(4096)|lm1",
    "sparse_64_4096": "top 64 of 4096",
    "lossless_bf16": "lossless bf16",
}


def measured(x: np.ndarray, policy: str) -> dict[str, float]:
    """Return bits a value (of the sections, not of the frame's header) and NMSE of one codec on a vector."""
    layout = Layout((TensorSpec("w", x.shape, "float32", Role.DELTA),))
    frame = encode({"w": x}, layout, policy, seed=1)
    error = decode(frame, layout)["w"].astype(np.float64) - x
    from compression import read_header

    header = read_header(frame)
    body = sum(size for group in header.groups for _, size in group.sections)
    return {"bits": 8 * body / x.size, "nmse": float((error**2).sum() / (x.astype(np.float64) ** 2).sum())}


def collected(task: str) -> np.ndarray:
    """Return one site's last update of a run of our own."""
    with tempfile.TemporaryDirectory() as scratch:
        watching = updates(task, Path(scratch), rounds=ROUNDS)
    return large_tensors(watching.changes[ROUNDS, "clinic"])


def kurtosis(x: np.ndarray) -> float:
    """Return the fourth moment over the square of the second: 3 for normal values."""
    wide = x.astype(np.float64)
    return float((wide**4).mean() / (wide**2).mean() ** 2)


def draw(folder: Path, points: Sequence[Point]) -> None:
    """Write distortion.svg, from about one bit on, and distortion-low.svg, below."""
    bound = [(r / 40, 2.0 ** (-2 * r / 40)) for r in range(1, 400)]
    for name, low, high in (("distortion", 0.9, 9.0), ("distortion-low", 0.0, 1.2)):
        picture = scatter(
            "Distortion against bits on real updates" if high > 2 else "Distortion below one bit",
            [p for p in points if low <= p.x <= high],
            list(SETS.values()),
            curve=bound,
            curve_label="normal values, limit 4^-bits",
        )
        (folder / f"{name}.svg").write_text(picture)


def main() -> None:
    """Collect, measure, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rates", default="", help="log of `benchmarks.codecs --json`; its last line is drawn"
    )
    parser.add_argument("--folder", default=str(FOLDER), help="where the pictures go")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    folder = Path(arguments.folder)
    result: dict[str, Any] = {}
    points = []
    for number, (task, name) in enumerate(SETS.items()):
        x = collected(task)
        rows = {label: measured(x, policy) for label, policy in CODECS.items()}
        result[task] = {"values": int(x.size), "kurtosis": round(kurtosis(x), 2), "codecs": rows}
        print(f"{name}: {x.size} values, kurtosis {kurtosis(x):.2f}")
        for label, row in rows.items():
            print(f"  {label:13s} {row['bits']:7.3f} bits  NMSE {row['nmse']:.4g}")
            if row["bits"] <= 9:
                points.append(Point(row["bits"], row["nmse"], label if number == 0 else "", number))
    draw(folder, points)
    (folder / "distortion.json").write_text(json.dumps(result, indent=1) + "\n")
    if arguments.rates:
        rates = json.loads(Path(arguments.rates).read_text().splitlines()[-1])
        rows = [
            (name, (rates[key]["encode_cpu_gb_s"], rates[key]["decode_cpu_gb_s"]))
            for key, name in RATES.items()
            if key in rates
        ]
        title = f"Throughput of one thread, {rates['numel']:,} values, GB/s of input"
        marks = [(rates["memcpy_cpu_gb_s"], "memcpy")]
        unit = "GB/s by the thread's own CPU time"
        (folder / "throughput.svg").write_text(
            bars(title, rows, ("encode", "decode"), unit=unit, marks=marks)
        )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
