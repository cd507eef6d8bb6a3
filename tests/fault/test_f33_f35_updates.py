"""Updates that lie about their weight (F33) or whose bytes are damaged or made to explode (F35), through the engine."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc

import numpy as np
import psutil
import pytest
import xxhash
from support import scripted
from support.scripted import Script, make_bench, wrap, wrap_bytes

import compression
from compression import Layout
from umbel.digest import state_crc
from umbel.messages import CONTROL_RECORD

pytestmark = pytest.mark.fault

# Large enough that the codec compresses it; small tensors travel as they are.
STATE = {"b": np.zeros(3, np.float32), "w": np.arange(8192, dtype=np.float32).reshape(64, 128)}
LAYOUT = Layout.from_arrays(STATE)
MEBIBYTE = 1 << 20
# What the round may take beyond its own small state.
MEMORY_LIMIT_BYTES = 8 * MEBIBYTE
BOMB_BYTES = 256 * MEBIBYTE


@pytest.fixture(autouse=True)
def _larger_state(monkeypatch) -> None:
    monkeypatch.setattr(scripted, "STATE", STATE)


def trio(fault) -> list[Script]:
    scripts = [Script("a", 1.0, tokens=10), Script("b", 2.0, tokens=30), Script("c", 4.0, tokens=60)]
    scripts[0].faults[1] = fault
    return scripts


WITHOUT_A = (30 * 2 + 60 * 4) / 90


def with_weight(value):
    """A reply whose control record says this weight; a bool or a list is no field of an honest reply."""

    def fault(message, reply, arrays):
        answer = wrap(message, reply, arrays)
        answer.content[CONTROL_RECORD]["weight"] = value
        return answer

    return fault


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, True, [1.0, 2.0], "10", [True]])
def test_f33_a_weight_that_is_no_positive_number_drops_the_update(weight) -> None:
    """F33: dropped, named, the others exact; the sum of weights that is divided by stays > 0."""
    bench = make_bench(trio(with_weight(weight)))
    record = bench.engine.run_round()
    assert [r["site"] for r in record["rejected"]] == ["a"]
    assert record["rejected"][0]["kind"] in ("weight", "header")
    assert sum(e["weight"] for e in record["accepted"]) == 90
    assert bench.values == [pytest.approx(WITHOUT_A, abs=1e-6)] * 3


def test_f33_a_weight_of_1e12_counts_as_what_the_data_can_give() -> None:
    """F33: the cap is the most target tokens that a round of this run can hold."""
    bench = make_bench(
        trio(with_weight(1e12)), "train.local-steps=1", "train.batch-size=1", "data.max-length=50"
    )
    record = bench.engine.run_round()
    assert {e["site"]: e["weight"] for e in record["accepted"]} == {"a": 50.0, "b": 30.0, "c": 50.0}


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def good(arrays) -> bytes:
    return compression.encode(arrays, LAYOUT, "lossless")


def rebuilt(frame: bytes, edit) -> bytes:
    """The frame with header document and body changed by `edit(document, body) -> body`, sealed again."""
    (length,) = struct.unpack_from("<I", frame, 8)
    document = json.loads(frame[12 : 12 + length])
    body = edit(document, frame[12 + length : -8])
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return sealed(frame[:8] + struct.pack("<I", len(text)) + text + body)


def flipped(arrays) -> bytes:
    frame = bytearray(good(arrays))
    frame[len(frame) // 2] ^= 1
    return bytes(frame)


def garbage(arrays) -> bytes:
    noise = np.random.default_rng(0).bytes(1 << 16)
    return rebuilt(good(arrays), lambda document, body: noise[: len(body)])


def cut(arrays) -> bytes:
    return good(arrays)[:-20]


def giant_header(arrays) -> bytes:
    def edit(document, body):
        document["numel"] = 1 << 40
        return body

    return rebuilt(good(arrays), edit)


def bomb(arrays) -> bytes:
    """Every zstd block states and holds 256 MiB of zeros in a few kB."""
    import zstandard

    squeezer = zstandard.ZstdCompressor(level=19).compressobj(size=BOMB_BYTES)
    pieces = [squeezer.compress(bytes(MEBIBYTE)) for _ in range(BOMB_BYTES // MEBIBYTE)]
    block = b"".join([*pieces, squeezer.flush()])
    assert len(block) < BOMB_BYTES // 1000

    def edit(document, body):
        # The small tensor comes first and as it is; the large one is the zstd block, its length and raw bytes.
        small, large = document["groups"]
        (_, first), (_, length), raw = small["sections"][0], large["sections"][0], large["sections"][2]
        large["sections"][0] = ["zstd", len(block)]
        assert len(body) == first + length + 4 + raw[1]
        return body[:first] + block + struct.pack("<I", len(block)) + body[-raw[1] :]

    return rebuilt(good(arrays), edit)


@pytest.mark.parametrize("make", [flipped, garbage, cut, giant_header, bomb], ids=lambda f: f.__name__)
def test_f35_a_corrupt_or_exploding_payload_is_refused_in_bounded_memory(make) -> None:
    """F35: a typed decode error, the site named, the others exact, memory within the limit."""
    frames = {}

    def fault(message, reply, arrays):
        frames["bad"] = make(arrays)
        return wrap_bytes(message, reply, frames["bad"])

    bench = make_bench(trio(fault), "compression.up=lossless")
    for script in bench.scripts.values():
        if script.name != "a":
            script.faults[1] = lambda message, reply, arrays: wrap_bytes(message, reply, good(arrays))
    # Once with a stand-in of the same length, so that imports and caches are not counted.
    warm = make_bench(trio(lambda m, r, a: wrap_bytes(m, r, b"x" * len(make(a)))), "compression.up=lossless")
    warm.engine.run_round()
    collect = bench.engine._collector.collect
    peak = {}

    def measured(opened):
        before = psutil.Process().memory_info().rss
        tracemalloc.start()
        try:
            return collect(opened)
        finally:
            peak["python"] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            peak["process"] = psutil.Process().memory_info().rss - before

    bench.engine._collector.collect = measured
    record = bench.engine.run_round()
    assert [(r["site"], r["kind"]) for r in record["rejected"]] == [("a", "frame")]
    assert record["rejected"][0]["reason"]
    event = bench.of("update_rejected")[0]
    assert (event["site"], event["kind"]) == ("a", "frame")
    assert peak["python"] < MEMORY_LIMIT_BYTES + 2 * len(frames["bad"])
    assert peak["process"] < 8 * MEMORY_LIMIT_BYTES
    assert bench.values == [pytest.approx(WITHOUT_A, abs=1e-6)] * 3


def test_f35_the_bomb_would_explode_where_nobody_looks() -> None:
    """The test above can fail: a plain decompressor makes 256 MiB of the same block."""
    import zstandard

    frame = bomb({k: v.copy() for k, v in STATE.items()})
    start = frame.index(struct.pack("<I", zstandard.MAGIC_NUMBER))
    assert zstandard.get_frame_parameters(frame[start:]).content_size == BOMB_BYTES
    assert state_crc(compression.decode(good(STATE), LAYOUT)) == state_crc(STATE)
