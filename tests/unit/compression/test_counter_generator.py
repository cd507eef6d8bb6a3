"""Golden vectors of the counter generator and of the frame: a change here breaks every peer."""

import hashlib

import numpy as np

from compression import Layout, encode
from compression.rng import hash32, splitmix64, stream_key, uniform


def test_splitmix64_golden():
    # first outputs of the published generator for seed 0 (Steele, Lea, Flood 2014; Vigna's reference)
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_hash32_is_a_bijection_and_golden():
    index = np.arange(1 << 16, dtype=np.uint32)
    assert np.unique(hash32(index, 12345)).size == index.size
    assert hash32(np.array([0, 1, 2], np.uint32), 0).tolist() == [0, 1753845952, 3507691905]


def test_uniform_is_exact_and_inside_the_open_interval():
    u = uniform(0, 1 << 16, stream_key(7, 1))
    assert u.dtype == np.float32
    assert 0 < u.min() < u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 0.005
    assert (np.float32(127) + u).max() < np.float32(128)  # the property the stochastic rounding rests on
    assert (uniform(100, 50, 9) == uniform(0, 150, 9)[100:]).all()


def test_golden_frames():
    x = (np.arange(8192, dtype=np.float32) - 4096) / np.float32(1024)
    arrays = {"w": (x * x * x).reshape(128, 64)}
    layout = Layout.from_arrays(arrays)
    digests = {
        policy: hashlib.sha256(encode(arrays, layout, policy, seed=1, round_index=1)).hexdigest()[:16]
        for policy in GOLDEN
    }
    assert digests == GOLDEN


GOLDEN = {
    "exact": "92f7131410d9961b",
    "bf16": "aa100a7a69a0ea05",
    "int8(256,rtn)": "d77857126275806f",
    "int8(256,sr)": "302ce2a082a8fcf1",
    "int4(64,rtn)": "d5d788bdb851207b",
    "int2(256,rtn)": "709a19b669138029",
    "sign(4096)": "881b02309710b07c",
    "had(4096)|lm2": "2f68ac5e20de6701",
    "topk(4096,64)|sign2|rice": "48ab724eee76d96f",
    "ecsq(step=2.0)|rans": "1a0133a200959ad0",
}
