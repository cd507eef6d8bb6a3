"""Mutated frames: refused with FrameError or decoded to something finite of the right shape; nothing else,
ever."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from compression import FrameError, Layout, decode, encode

pytestmark = pytest.mark.codec

ARRAYS = {
    "w": np.random.default_rng(0).standard_normal((80, 60)).astype(np.float32),
    "n": np.arange(3),
    "m": np.array([True]),
}
LAYOUT = Layout.from_arrays(ARRAYS)
POLICIES = [
    "exact",
    "lossless",
    "bf16",
    "int8",
    "int4",
    "int2",
    "int8cb",
    "tok8",
    "sign(256)",
    "had(256)|lm2",
    "topk(256,9)|sign2|rice",
    "topk(256,9)|bf16|flat",
    "ecsq(step=0.5)|rans",
    "ecsq(step=0.5)|zstd",
    "lowrank(2)",
    "randk(0.2)",
]
FRAMES = {policy: encode(ARRAYS, LAYOUT, policy, seed=1) for policy in POLICIES}


def accepted_or_refused(data: bytes) -> bool:
    try:
        received = decode(data, LAYOUT)
    except FrameError as error:
        return not error.code  # a refusal has a code
    for name, array in ARRAYS.items():
        assert (received[name].shape, received[name].dtype) == (array.shape, array.dtype)
        assert np.isfinite(received[name].astype(np.float64)).all()
    return True


@pytest.mark.parametrize("policy", POLICIES)
def test_every_truncation_is_refused(policy):
    frame = FRAMES[policy]
    for length in range(0, len(frame), max(len(frame) // 60, 1)):
        assert not accepted_or_refused(frame[:length])


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 1 << 30), bit=st.integers(0, 7))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_flipped_bit_is_refused(policy, position, bit):
    data = bytearray(FRAMES[policy])
    data[position % len(data)] ^= 1 << bit
    assert not accepted_or_refused(bytes(data))


@settings(max_examples=60, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 1 << 30), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4
    )
)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_attackers_edit_with_a_right_checksum_is_survived(policy, edits):
    """The checksum is no authentication: whoever recomputes it still meets every other check."""
    data = bytearray(FRAMES[policy][:-8])
    for position, new in edits:
        at = position % len(data)
        data[at : at + len(new)] = new[: len(data) - at]
    accepted_or_refused(bytes(data) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data))))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data):
    assert not accepted_or_refused(data)
    assert not accepted_or_refused(b"FCF1\x01\x00\x00\x00" + data)
