"""Rates, distortion and sizes of the codecs, one thread, beside memcpy and the peers of the same run.

    python -m benchmarks.codecs --json [--numel 100000000] [--repeats 5]

Data: the pseudo-gradient (local minus global) of a small byte-level transformer after 30 AdamW steps on
real text, tiled to `numel` values; its bf16 weights for the lossless codec. GB/s are of fp32 input (of bf16
for `lossless_bf16`), medians over the repeats, into reused buffers. On a machine shared with others wall
time measures the neighbours too, so every rate comes twice: wall clock, and `_cpu` by the thread's own CPU
time; `memcpy` is taken both ways as well. The JSON object is the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.codec_peers import peer_rates
from compression import (
    FrameWriter,
    Layout,
    Role,
    TensorSpec,
    accumulate,
    accumulate_many,
    decode,
    encode,
    encode_into,
)
from compression.kernels import backend

TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinyshakespeare.txt"
Rate = dict[str, Any]


def pseudo_gradient() -> tuple[np.ndarray, np.ndarray, str]:
    """(delta, weights, description): fp32 vectors of one small model trained on real text."""
    if not TEXT.exists():
        rng = np.random.default_rng(0)
        return (
            rng.laplace(size=1 << 20).astype(np.float32),
            rng.standard_normal(1 << 20).astype(np.float32),
            "laplace",
        )
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    body = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    embed, head = torch.nn.Embedding(256, 128), torch.nn.Linear(128, 256, bias=False)
    model = torch.nn.ModuleList([embed, body, head])
    mask = torch.nn.Transformer.generate_square_subsequent_mask(64)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(1)

    def steps(count: int) -> None:
        for _ in range(count):
            at = torch.randint(0, text.numel() - 65, (16,), generator=draw)
            batch = torch.stack([text[i : i + 65] for i in at])
            logits = head(body(embed(batch[:, :-1]), mask=mask, is_causal=True))
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def flat() -> np.ndarray:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.dim() > 1]).numpy().copy()

    steps(60)
    before = flat()
    steps(30)
    after = flat()
    return after - before, after, f"pseudo-gradient of {after.size} values, H = 30, tinyshakespeare"


class Bench:
    """Times functions over a fixed amount of data."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats

    def rate(self, work: Callable[[], Any], num_bytes: int) -> tuple[float, float]:
        """(wall, cpu) GB/s, medians; one call before them warms caches and compilers."""
        work()
        wall, cpu = [], []
        for _ in range(self.repeats):
            wall_start, cpu_start = time.perf_counter(), time.thread_time()
            work()
            cpu.append(time.thread_time() - cpu_start)
            wall.append(time.perf_counter() - wall_start)
        return tuple(num_bytes / statistics.median(times) / 1e9 for times in (wall, cpu))  # type: ignore[return-value]

    def codec(self, x: np.ndarray, policy: str, dtype: str = "float32") -> Rate:
        """Encode and decode rates, bits a value, NMSE and ratio of one policy."""
        layout = Layout((TensorSpec("w", x.shape, dtype, Role.DELTA),))
        writer, out = FrameWriter(), {"w": np.empty_like(x)}
        enc = self.rate(lambda: encode_into(writer, {"w": x}, layout, policy, seed=1), x.nbytes)
        frame = encode({"w": x}, layout, policy, seed=1)
        dec = self.rate(lambda: decode(frame, layout, out=out), x.nbytes)
        return {
            "policy": policy,
            "encode_gb_s": enc[0],
            "decode_gb_s": dec[0],
            "encode_cpu_gb_s": enc[1],
            "decode_cpu_gb_s": dec[1],
            "nmse": nmse(x, out["w"]),
            "bits": 8 * len(frame) / x.size,
            "ratio": x.nbytes / len(frame),
        }


def memcpy_rate(bench: Bench, x: np.ndarray) -> tuple[float, float]:
    """Source bytes a second of a copy between warm buffers."""
    target = np.zeros_like(x)
    return bench.rate(lambda: np.copyto(target, x), x.nbytes)


def nmse(x: np.ndarray, y: np.ndarray) -> float:
    error = energy = 0.0
    for start in range(0, x.size, 1 << 20):
        a, b = (
            x[start : start + (1 << 20)].astype(np.float64),
            y[start : start + (1 << 20)].astype(np.float64),
        )
        error += float(((a - b) ** 2).sum())
        energy += float((a**2).sum())
    return error / energy


def accumulate_rates(bench: Bench, x: np.ndarray, num_frames: int = 4) -> Rate:
    """int8 frames summed in float64, against Flower's aggregation of the same number of dense arrays."""
    layout = Layout((TensorSpec("w", x.shape, "float32", Role.DELTA),))
    frames = [encode({"w": x}, layout, "int8(256,rtn)", seed=seed) for seed in range(num_frames)]
    out, weights = np.zeros(x.size), [1 / num_frames] * num_frames
    amount = num_frames * x.nbytes
    many = bench.rate(lambda: accumulate_many(frames, layout, out, weights, verified=True), amount)
    checked = bench.rate(lambda: accumulate_many(frames, layout, out, weights), amount)
    one = bench.rate(lambda: accumulate(frames[0], layout, out, 0.5, verified=True), x.nbytes)
    flower = flower_rate(bench, x, num_frames)
    return {
        "gb_s": many[0],
        "cpu_gb_s": many[1],
        "with_verification_gb_s": checked[0],
        "one_frame_gb_s": one[0],
        "one_frame_cpu_gb_s": one[1],
        "flower_gb_s": flower[0],
        "flower_cpu_gb_s": flower[1],
        "vs_flower": many[0] / flower[0],
        "vs_flower_cpu": many[1] / flower[1],
        "frames": num_frames,
    }


def flower_rate(bench: Bench, x: np.ndarray, num_frames: int) -> tuple[float, float]:
    """Flower's own weighted average of dense arrays, as its strategies call it."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    records = [
        RecordDict({"arrays": ArrayRecord([x]), "metrics": MetricRecord({"num-examples": 1.0})})
        for _ in range(num_frames)
    ]
    return bench.rate(lambda: aggregate_arrayrecords(records, "num-examples"), num_frames * x.nbytes)


def run(numel: int, repeats: int) -> Rate:
    bench = Bench(repeats)
    delta, model, description = pseudo_gradient()
    x = np.resize(delta, numel)
    weights = np.resize(model.astype(ml_dtypes.bfloat16), numel)
    copy = memcpy_rate(bench, x)
    scaled = (delta / delta.std()).astype(np.float64)
    result: Rate = {
        "numel": numel,
        "data": description,
        "kurtosis": float((scaled**4).mean()),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "memcpy_gb_s": copy[0],
        "memcpy_cpu_gb_s": copy[1],
    }
    rows = {
        "int8": "int8(256,rtn)",
        "int8_sr": "int8(256,sr)",
        "int8_64": "int8(64,rtn)",
        "int4": "int4(64,rtn)",
        "int2": "int2(256,rtn)",
        "four_bit": "ecsq(rate=3.98)",
        "two_bit": "ecsq(rate=1.99)",
        "one_bit": "ecsq(rate=1.09)",
        "one_bit_sign": "sign(4096)",
        "one_bit_rotation": "had(4096)|lm1",
    }
    for name, policy in rows.items():
        result[name] = bench.codec(x, policy)
        log(name, result[name])
    sparse = bench.codec(x, "topk(4096,64)|sign2|rice")
    result["sparse_64_4096"] = sparse | {
        "topk_gb_s": sparse["encode_gb_s"],
        "topk_cpu_gb_s": sparse["encode_cpu_gb_s"],
    }
    log("sparse_64_4096", sparse)
    result["lossless_bf16"] = bench.codec(weights, "lossless", "bfloat16")
    log("lossless_bf16", result["lossless_bf16"])
    result["accumulate"] = accumulate_rates(bench, x)
    log("accumulate", result["accumulate"])
    result["peers"] = peer_rates(bench.rate, x, weights)
    for name, row in result["peers"].items():
        log(name, row)
    result["targets"] = targets(result)
    return result


def targets(r: Rate) -> Rate:
    """Every target as [measured, wanted, met]; ratios to memcpy use CPU time on both sides."""
    copy = r["memcpy_cpu_gb_s"]
    table = [
        ("int8 encode / memcpy", r["int8"]["encode_cpu_gb_s"] / copy, ">=", 0.40),
        ("int8 sr encode / memcpy", r["int8_sr"]["encode_cpu_gb_s"] / copy, ">=", 0.30),
        ("int8 nmse", r["int8"]["nmse"], "<=", 4e-5),
        ("int4 encode / memcpy", r["int4"]["encode_cpu_gb_s"] / copy, ">=", 0.30),
        ("4-bit nmse", r["four_bit"]["nmse"], "<=", 0.0055),
        ("4-bit bits", r["four_bit"]["bits"], "<=", 4.0),
        ("4-bit encode GB/s", r["four_bit"]["encode_cpu_gb_s"], ">=", 1.0),
        ("4-bit decode GB/s", r["four_bit"]["decode_cpu_gb_s"], ">=", 1.0),
        ("2-bit nmse", r["two_bit"]["nmse"], "<=", 0.080),
        ("2-bit bits", r["two_bit"]["bits"], "<=", 2.0),
        ("2-bit encode GB/s", r["two_bit"]["encode_cpu_gb_s"], ">=", 1.0),
        ("2-bit decode GB/s", r["two_bit"]["decode_cpu_gb_s"], ">=", 1.0),
        ("1-bit nmse", r["one_bit"]["nmse"], "<=", 0.30),
        ("1-bit bits", r["one_bit"]["bits"], "<=", 1.1),
        ("sparse ratio", r["sparse_64_4096"]["ratio"], ">=", 210.0),
        ("sparse encode / memcpy", r["sparse_64_4096"]["encode_cpu_gb_s"] / copy, ">=", 0.12),
        ("lossless bf16 ratio", r["lossless_bf16"]["ratio"], ">=", 1.45),
        ("lossless encode GB/s", r["lossless_bf16"]["encode_cpu_gb_s"], ">=", 0.6),
        ("lossless decode GB/s", r["lossless_bf16"]["decode_cpu_gb_s"], ">=", 2.5),
        ("accumulate / memcpy", r["accumulate"]["cpu_gb_s"] / copy, ">=", 0.40),
        ("accumulate / Flower", r["accumulate"]["vs_flower_cpu"], ">=", 1.0),
    ]
    return {
        name: [round(got, 6), f"{sign} {wanted:g}", bool(got >= wanted if sign == ">=" else got <= wanted)]
        for name, got, sign, wanted in table
    }


def log(name: str, row: Rate) -> None:
    cells = [
        f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    ]
    print(f"{name:18s} " + "  ".join(cells), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=100_000_000, help="values (default: 100 million)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs per figure; the median counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args()
    with backend("numba"):
        result = run(options.numel, options.repeats)
    for name, (got, wanted, met) in result["targets"].items():
        print(f"{'ok  ' if met else 'MISS'} {name:26s} {got:<12g} {wanted}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
