"""Speed of the server's arithmetic beside memcpy and beside Flower's aggregation of the dense arrays.

    python -m benchmarks.server_step --json [--numel 100000000] [--repeats 5]

`memcpy_gb_s`      source bytes a second of a copy between warm buffers (its traffic is twice that: read and write)
`int8_gb_s`        four int8 frames summed with float64, in bytes of the fp32 arrays they stand for
`int8_vs_memcpy`   the same over memcpy_gb_s
`flower_gb_s`      Flower's `aggregate_arrayrecords` of four dense fp32 records of the same numbers
`int8_vs_flower`   int8_gb_s over flower_gb_s
`outer_gb_s`       the fused Nesterov step, 20 bytes a parameter (read x, average, v; write x, v)
`outer_vs_memcpy`  the same over memcpy's traffic
`merge_gb_s`       sum and outer step together, as the engine does them, in bytes of the fp32 arrays summed

One thread, medians. Every ratio is the median of ratios of figures taken one after the other, so that a neighbour on
the machine slows both sides alike; `_cpu` is by the thread's own CPU time. The JSON object is the last line.
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
from typing import Any

import numpy as np

from compression import Layout, Role, TensorSpec, accumulate_many, encode
from compression.kernels import backend
from strategies.aggregation import fused

FRAMES = 4


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return (wall, CPU) seconds of one call."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - wall, time.thread_time() - cpu


class Figures:
    """Times named pieces of work turn by turn and compares them within a turn."""

    def __init__(self, work: dict[str, tuple[Callable[[], Any], float]], repeats: int) -> None:
        self.rates: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
        for run, _ in work.values():
            run()
        for _ in range(repeats):
            for name, (run, num_bytes) in work.items():
                wall, cpu = timed(run)
                self.rates[name].append((num_bytes / wall / 1e9, num_bytes / cpu / 1e9))

    def rate(self, name: str, kind: int = 0) -> float:
        """Return the median GB/s; `kind` 0 by wall clock, 1 by CPU time."""
        return statistics.median(pair[kind] for pair in self.rates[name])

    def ratio(self, name: str, other: str, kind: int = 0) -> float:
        """Return the median over turns of one rate over another."""
        pairs = zip(self.rates[name], self.rates[other], strict=True)
        return statistics.median(a[kind] / b[kind] for a, b in pairs)


def run(numel: int, repeats: int) -> dict[str, Any]:
    """Measure everything once and return the figures."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    rng = np.random.default_rng(0)
    x = np.resize((1e-3 * rng.standard_normal(1 << 20)).astype(np.float32), numel)
    layout = Layout((TensorSpec("w", (numel,), "float32", Role.DELTA),))
    frames = [encode({"w": x}, layout, "int8(256,rtn)", seed=seed) for seed in range(FRAMES)]
    total, weights = np.zeros(numel), [1.0 / FRAMES] * FRAMES
    target, theta, momentum = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    records = [
        RecordDict({"arrays": ArrayRecord([x]), "metrics": MetricRecord({"num-examples": 1.0})})
        for _ in range(FRAMES)
    ]
    dense = float(FRAMES * x.nbytes)
    figures = Figures(
        {
            "memcpy": (lambda: np.copyto(target, x), float(x.nbytes)),
            "int8": (lambda: accumulate_many(frames, layout, total, weights, verified=True), dense),
            "flower": (lambda: aggregate_arrayrecords(records, "num-examples"), dense),
            "traffic": (lambda: np.copyto(target, x), 2.0 * x.nbytes),
            "outer": (lambda: fused.sgd(theta, x, momentum, 0.7, 0.9, True), 20.0 * numel),
        },
        repeats,
    )
    result: dict[str, Any] = {
        "numel": numel,
        "frames": FRAMES,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }
    for kind, suffix in enumerate(("", "_cpu")):
        result |= {
            f"memcpy{suffix}_gb_s": figures.rate("memcpy", kind),
            f"int8{suffix}_gb_s": figures.rate("int8", kind),
            f"flower{suffix}_gb_s": figures.rate("flower", kind),
            f"outer{suffix}_gb_s": figures.rate("outer", kind),
            f"int8_vs_memcpy{suffix}": figures.ratio("int8", "memcpy", kind),
            f"int8_vs_flower{suffix}": figures.ratio("int8", "flower", kind),
            f"outer_vs_memcpy{suffix}": figures.ratio("outer", "traffic", kind),
        }
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}


def main() -> int:
    """Print the figures; 1 when one is below its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with backend("numba"):
        result = run(options.numel, options.repeats)
    bars = {"int8_vs_memcpy": 0.40, "int8_vs_flower": 1.5, "outer_vs_memcpy": 0.9}
    for name, bar in bars.items():
        print(f"{'ok  ' if result[name] >= bar else 'MISS'} {name:16s} {result[name]:<8g} >= {bar:g}")
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    return 0 if all(result[name] >= bar for name, bar in bars.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
