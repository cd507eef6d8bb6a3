"""Same bytes from numpy and compiled kernels and from any number of threads; same values back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compression import Layout, Role, TensorSpec, accumulate, decode, encode, read_header
from compression.kernels import backend
from compression.parallel import threads

pytest.importorskip("numba")
pytestmark = pytest.mark.codec

POLICIES = [
    "int8(256,rtn)",
    "int8(64,sr)",
    "int4(64,rtn)",
    "int4(32,sr)",
    "int2(256,rtn)",
    "int2(16,sr)",
    "tok8(sr)",
    "sign(4096)",
    "sign(16)",
    "had(4096)|lm1",
    "had(1024)|lm2(unbiased)",
    "had(256)|lm3",
    "had(64)|lm4",
    "topk(4096,64)|sign2|rice",
    "topk(1024,100)|bf16|rice",
    "topk(16,16)|fp32|rice",
    "topk(65536,3)|sign2|rice",
    "ecsq(rate=2.0)",
    "ecsq(rate=0.2)",
    "ecsq(rms=0.1)|rans",
    "ecsq(rms=0.3)|zstd",
    "bf16",
    "lossless",
]


def nasty(numel: int, seed: int) -> np.ndarray:
    """Ties, zeros of both signs, subnormals, a wide dynamic range, and ordinary values."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, numel).astype(np.float32)
    x[: numel // 8] = np.round(x[: numel // 8] * 2) / 2
    where = rng.integers(0, numel, numel // 16)
    x[where] *= np.float32(1e-41)
    x[where[::2]] = -0.0
    x[numel // 2 : numel // 2 + numel // 10] *= np.float32(1e-6)
    return x


def all_ways(x: np.ndarray, policy: str, seed: int) -> None:
    layout = Layout((TensorSpec("w", x.shape, "float32", Role.DELTA),))
    policy = f"{policy};min=0"
    with backend("numpy"):
        frame = encode({"w": x}, layout, policy, seed=seed)
        received = decode(frame, layout)["w"]
        total = np.zeros(x.size)
        accumulate(frame, layout, total, 0.3)
    with backend("numba"):
        assert encode({"w": x}, layout, policy, seed=seed) == frame
        assert decode(frame, layout)["w"].tobytes() == received.tobytes()
        other = np.zeros(x.size)
        accumulate(frame, layout, other, 0.3)
        assert other.tobytes() == total.tobytes()
        for count in (2, 3):
            with threads(count):
                assert encode({"w": x}, layout, policy, seed=seed) == frame


@pytest.mark.parametrize("policy", POLICIES)
def test_same_bytes_over_several_segments(policy):
    all_ways(nasty((1 << 18) + 5 * 1000, 1).reshape(-1, 8), policy, 9)


@settings(max_examples=8, deadline=None)
@given(numel=st.integers(1, 20000), seed=st.integers(0, 1 << 62))
@pytest.mark.parametrize("policy", POLICIES)
def test_same_bytes_for_odd_sizes(policy, numel, seed):
    all_ways(nasty(numel, seed % 1000), policy, seed)


def test_refusals_are_the_same():
    x = nasty(70000, 0)
    layout = Layout((TensorSpec("w", x.shape, "float32", Role.DELTA),))
    for policy in POLICIES[:-2]:
        for value in (np.inf, np.nan, 3e38):
            bad = x.copy()
            bad[66000] = value
            outcomes = []
            for name in ("numpy", "numba"):
                with backend(name):
                    try:
                        outcomes.append(encode({"w": bad}, layout, policy))
                    except ValueError as error:
                        outcomes.append(str(error))
            assert outcomes[0] == outcomes[1], (policy, value)


def test_the_step_of_a_rate_is_recorded_in_hex():
    x = nasty(5000, 2)
    layout = Layout((TensorSpec("w", x.shape, "float32", Role.DELTA),))
    (spec,) = read_header(encode({"w": x}, layout, "ecsq(rate=1.0)")).specs
    assert spec.startswith("ecsq(step=0x1.")
    assert spec.endswith("|rans")
