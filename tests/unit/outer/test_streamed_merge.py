"""Merging straight from frames: equal to the dense way, with memory and gauges of its own."""

from __future__ import annotations

import numpy as np
import pytest

from compression import Layout, encode
from compression.payload import change, decode_update, delta_layout
from compression.summing import sums
from strategies.aggregation.mean import WeightedMean
from strategies.aggregation.outer import SGD
from strategies.outer import streamed

RNG = np.random.default_rng(3)
STATE = {
    "w": RNG.normal(size=(300, 64)).astype(np.float32),
    "v": RNG.normal(size=9000).astype(np.float32),
    "bias": RNG.normal(size=8).astype(np.float32),
    "buffer:count": np.array(3, np.int64),
}
LAYOUT = Layout.from_arrays(STATE)
POLICIES = (
    "int8(256,rtn)",
    "int4(64,rtn)",
    "int2(256,rtn)",
    "ecsq(rate=1.0)",
    "topk(4096,64)|sign2|rice",
    "sign(4096)",
)
WEIGHTS = [3.0, 1.0, 2.0]


def frames_of(policy):
    found = []
    for site in range(3):
        rng = np.random.default_rng(site)
        local = {
            n: v + (1e-2 * rng.normal(size=v.shape)).astype(v.dtype) if v.dtype.kind == "f" else v + site
            for n, v in STATE.items()
        }
        found.append(encode(change(local, STATE, LAYOUT), delta_layout(LAYOUT), policy, seed=site))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_every_element_once_and_the_sum_is_the_decoded_sum(policy):
    frames, wide = frames_of(policy), delta_layout(LAYOUT)
    seen = {n: np.zeros(v.size) for n, v in STATE.items()}
    for piece in sums(frames, wide, WEIGHTS, rows_of=lambda segment: True):
        part = slice(piece.start, piece.start + (piece.rows[0] if piece.total is None else piece.total).size)
        assert not seen[piece.name][part].any()
        seen[piece.name][part] = 1 if piece.total is None else piece.total
    from compression import decode

    decoded = [decode(f, wide) for f in frames]
    for name, value in STATE.items():
        if value.dtype.kind == "f":
            want = sum(
                w * d[name].reshape(-1).astype(np.float64) for w, d in zip(WEIGHTS, decoded, strict=True)
            )
            assert np.array_equal(seen[name], want)


@pytest.mark.parametrize(
    ("policy", "outer"),
    [
        (POLICIES[0], None),
        (POLICIES[1], (0.7, 0.9, True)),
        (POLICIES[4], (0.65, 0.0, False)),
        (POLICIES[5], (0.7, 0.5, True)),
    ],
)
def test_equal_to_decoding_averaging_and_stepping(policy, outer):
    """Three rounds; the dense way rounds the average to float32 in between, hence a tolerance of a few ulp."""
    lean = SGD(*outer) if outer else None
    dense = SGD(*outer) if outer else None
    ours = {n: v.copy() for n, v in STATE.items()}
    theirs = {n: v.copy() for n, v in STATE.items()}
    frames = frames_of(policy)
    for _ in range(3):
        ours, gauges = streamed.merge(ours, frames, delta_layout(LAYOUT), WEIGHTS, lean, ["a", "b", "c"])
        mean = WeightedMean(theirs)
        for frame, weight in zip(frames, WEIGHTS, strict=True):
            mean.add(decode_update(frame, LAYOUT, policy, theirs), weight)
        average = mean.result()
        moved = {n: np.array(v) for n, v in theirs.items()}
        if dense is None:
            moved = average
        else:
            dense.step(moved, average)
        theirs = moved
    for name in STATE:
        assert ours[name].dtype == STATE[name].dtype and ours[name].shape == STATE[name].shape
        assert np.allclose(ours[name], theirs[name], rtol=0, atol=3e-6)
    assert ours["buffer:count"] == 5
    assert set(gauges["drift"]) == {"a", "b", "c"}


def test_one_site_sent_twice_is_that_site_exactly():
    """D13: identical sites give the single site's step."""
    frame = frames_of("int8(256,rtn)")[0]
    one, _ = streamed.merge(STATE, [frame], delta_layout(LAYOUT), [2.0], None)
    two, gauges = streamed.merge(STATE, [frame, frame], delta_layout(LAYOUT), [1.0, 1.0], None, ["a", "b"])
    assert all(one[n].tobytes() == two[n].tobytes() for n in STATE)
    assert gauges["cosine"] == pytest.approx(1.0) and gauges["to_merge"] == pytest.approx(1.0)


def test_an_overflow_is_an_error():
    huge = {n: np.full_like(v, 3e38) if v.dtype.kind == "f" else v for n, v in STATE.items()}
    local = {n: np.full_like(v, 3.4e38) if v.dtype.kind == "f" else v for n, v in STATE.items()}
    frame = encode(change(local, huge, LAYOUT), delta_layout(LAYOUT), "int8(256,rtn)")
    with pytest.raises(streamed.Diverged), np.errstate(over="ignore"):
        streamed.merge(huge, [frame], delta_layout(LAYOUT), [1.0], SGD(10.0, 0.9, True))


def test_frames_of_two_policies_do_not_mix():
    with pytest.raises(ValueError, match="policies"):
        list(sums([frames_of(POLICIES[0])[0], frames_of(POLICIES[1])[1]], delta_layout(LAYOUT), [1.0, 1.0]))
