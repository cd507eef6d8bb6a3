"""Mutate frames and decode them: no crash, no over-allocation, no wrong acceptance.

    python -m benchmarks.frame_fuzz --mutations 1000000 --json

Two kinds of mutation, alternating. *Accidents* change, cut, insert or swap bytes and leave the checksum as
it was: every one must be refused. *Attacks* do the same and then repair the checksum (and sometimes header
lengths): each is refused with FrameError or decodes to finite arrays of exactly the receiver's shapes and
dtypes. Peak memory of the process is watched: it may not grow by more than 64 MiB over the whole run. The
JSON object is the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import xxhash

from compression import FrameError, Layout, decode, encode

POLICIES = [
    "exact",
    "lossless",
    "bf16",
    "fp16",
    "fp32",
    "int8",
    "int8(64,sr)",
    "int4",
    "int2",
    "int8cb",
    "tok8",
    "sign(256)",
    "had(256)|lm1",
    "had(64)|lm3",
    "topk(256,9)|sign2|rice",
    "topk(256,9)|bf16|flat",
    "topk(64,3)|fp32|rice",
    "dct|topk(4096,64)|sign2|rice",
    "ecsq(step=0.5)|rans",
    "ecsq(step=0.5)|zstd",
    "lowrank(2)",
    "randk(0.2)",
]
ARRAYS = {
    "w": np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32),
    "n": np.arange(3),
    "m": np.array([True]),
}
LAYOUT = Layout.from_arrays(ARRAYS)


def mutate(frame: bytes, draw: random.Random, repair: bool) -> bytes:
    """One to four random edits; with `repair` the checksum is made right again."""
    data = bytearray(frame[:-8] if repair else frame)
    body = 12 + struct.unpack_from("<I", frame, 8)[0]
    deep = (
        repair and draw.random() < 0.7
    )  # leave the header as it is, so that the sections themselves are read
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(body, len(data)) if deep else draw.randrange(len(data))
        kind = draw.choice((0, 1, 2, 5)) if deep else draw.randrange(6)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        elif kind == 2:
            data[at : at + 4] = struct.pack(
                "<I", draw.choice((0, 1, 2**31 - 1, 2**32 - 1, draw.getrandbits(32)))
            )
        elif kind == 3:
            del data[at : at + draw.randint(1, 16)]
        elif kind == 4:
            data[at:at] = draw.randbytes(draw.randint(1, 16))
        else:
            other = draw.randrange(body, len(data)) if deep else draw.randrange(len(data))
            data[at], data[other] = data[other], data[at]
        if not data:
            data = bytearray(b"F")
    if repair:
        if (
            len(data) > 12 and draw.random() < 0.5
        ):  # keep the header length right, so that the header itself is read
            end = data.find(b'"seed":')
            close = data.find(b"}", end) if end > 0 else -1
            if close > 0:
                data[8:12] = struct.pack("<I", close + 1 - 12)
        data += struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data)))
    return bytes(data)


def right_shape(received: dict[str, np.ndarray]) -> bool:
    return list(received) == [entry.name for entry in LAYOUT.entries] and all(
        received[name].shape == array.shape
        and received[name].dtype == array.dtype
        and bool(np.isfinite(received[name].astype(np.float64)).all())
        for name, array in ARRAYS.items()
    )


def run(count: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    frames = [encode(ARRAYS, LAYOUT, f"{policy};min=0", seed=1) for policy in POLICIES]
    known = set(frames)
    codes: Counter[str] = Counter()
    crashes: list[str] = []
    wrong = accepted = 0
    start, before = time.perf_counter(), peak_mib()
    for number in range(count):
        repair = number % 2 == 1
        data = mutate(frames[number % len(frames)], draw, repair)
        if data in known:
            continue
        try:
            received = decode(data, LAYOUT)
        except FrameError as error:
            codes[error.code] += 1
        except Exception as error:
            crashes.append(
                f"{type(error).__name__}: {error} ({POLICIES[number % len(frames)]}, {data.hex()[:400]})"
            )
        else:
            accepted += 1
            wrong += not repair or not right_shape(received)
        if number and number % 100_000 == 0:
            print(f"{number} mutations, {len(crashes)} crashes, {wrong} wrong", file=sys.stderr, flush=True)
    return {
        "mutations": count,
        "seed": seed,
        "crashes": len(crashes),
        "first_crashes": crashes[:3],
        "wrong_accepts": wrong,
        "attacks_that_decode_to_other_finite_values": accepted,
        "peak_growth_mib": round(peak_mib() - before, 1),
        "refusals": dict(codes.most_common()),
        "seconds": round(time.perf_counter() - start, 1),
    }


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args()
    result = run(options.mutations, options.seed)
    bad = result["crashes"] or result["wrong_accepts"] or result["peak_growth_mib"] > 64
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
