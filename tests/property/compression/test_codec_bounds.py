"""Every codec keeps the bound it declares, on ordinary and on nasty vectors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from compression import Layout, Role, TensorSpec, decode, encode
from compression.bounds import Absolute, Contractive, Exact, Unbiased
from compression.codecs.dct import basis, transform
from compression.kernels import ref_bits
from compression.policy import parse_policy
from compression.registry import build
from compression.spec import parse

pytestmark = pytest.mark.codec

FLOATS = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=True)
VECTORS = arrays(np.float32, st.integers(1, 700), elements=FLOATS)
CONTRACTIVE = [
    "bf16",
    "int8(64,rtn)",
    "int4(64,rtn)",
    "int2(16,rtn)",
    "sign(256)",
    "had(256)|lm1",
    "had(256)|lm2",
    "had(64)|lm4",
    "topk(64,5)|fp32|flat",
    "topk(64,5)|fp32|rice",
    "topk(64,5)|bf16|rice",
    "topk(256,7)|sign2|rice",
    "dct|topk(4096,64)|fp32|rice",
    "randk(0.5)",
    "ecsq(rms=1.0)",
    "ecsq(rate=1.0)",
]


def through(x: np.ndarray, policy: str, seed: int = 0) -> np.ndarray:
    layout = Layout((TensorSpec("w", x.shape, x.dtype.name, Role.DELTA),))
    return decode(encode({"w": x}, layout, f"{policy};min=0", seed=seed), layout)["w"]


def energy(x: np.ndarray) -> float:
    return float((x.astype(np.float64) ** 2).sum())


def nmse(x: np.ndarray, y: np.ndarray) -> float:
    return energy(y.astype(np.float64) - x) / max(energy(x), 1e-300)


@settings(max_examples=25, deadline=None)
@given(x=VECTORS)
@pytest.mark.parametrize("policy", CONTRACTIVE)
def test_contractive(policy, x):
    bound = build(parse(policy)).bound
    delta = bound.delta if isinstance(bound, Contractive) and not policy.startswith("randk") else 0.0
    # values that a scale cannot represent are sent as zero: their error is the value itself, still no
    # expansion
    slack = 1e-5 + (1 - delta if energy(x) < 1e-60 * x.size else 0)
    assert (
        energy(through(x, policy).astype(np.float64) - x) <= (1 - delta + slack) * energy(x) * 1.0001 + 1e-290
    )


@settings(max_examples=40, deadline=None)
@given(x=VECTORS, bits=st.sampled_from([8, 4, 2]), rounding=st.sampled_from(["rtn", "sr"]))
def test_integer_blocks_err_by_half_a_step_or_one(x, bits, rounding):
    block, levels = 64, 2 ** (bits - 1) - 1
    y = through(x, f"int{bits}({block},{rounding})")
    for start in range(0, x.size, block):
        part, got = x[start : start + block].astype(np.float64), y[start : start + block].astype(np.float64)
        step = float(ref_bits_scale(np.abs(part).max(), levels))
        error = np.abs(part - got)
        if step == 0:
            assert not got.any()
        elif rounding == "rtn":
            assert (error <= np.minimum(np.abs(part), step / 2) * (1 + 1e-6)).all()
        else:
            assert (error < step * (1 + 1e-6)).all()


def ref_bits_scale(biggest: float, levels: int) -> np.float32:
    from compression.kernels.ref_int import block_scales

    return block_scales(np.array([biggest], np.float32), np.float32(levels))[0]


@settings(max_examples=40, deadline=None)
@given(x=VECTORS)
def test_absolute_bound_of_ecsq(x):
    step = float(np.abs(x).max()) / 100 or 1.0
    if step < 1e-35:
        return
    y = through(x, f"ecsq(step={step!r})|rans")
    assert np.abs(x.astype(np.float64) - y).max() <= step * (1 + 1e-5)
    assert isinstance(build(parse(f"ecsq(step={step!r})|rans")).bound, Absolute)


@settings(max_examples=40, deadline=None)
@given(x=VECTORS)
def test_top_k_error_is_the_energy_of_what_was_dropped(x):
    y = through(x, "topk(64,5)|fp32|rice")
    kept = y != 0
    assert (y[kept] == x[kept]).all()
    for start in range(0, x.size, 64):
        part, got = x[start : start + 64], kept[start : start + 64]
        budget = -(-5 * part.size // 64)
        assert got.sum() <= budget
        dropped = np.sort(np.abs(part))[: part.size - budget]
        assert energy(part[~got]) == pytest.approx(energy(dropped), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    x=arrays(np.float32, st.integers(1, 300), elements=st.floats(-100, 100, width=32, allow_subnormal=False))
)
def test_sign_identity(x):
    """1 - NMSE = ||x||_1^2 / (C ||x||^2) per chunk."""
    if np.abs(x).mean() < 1e-6:
        return
    y = through(x[:256], "sign(256)")
    part = x[:256].astype(np.float64)
    expected = np.abs(part).sum() ** 2 / (part.size * energy(part))
    assert 1 - nmse(part, y) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "policy", ["int4(64,sr)", "int2(64,sr)", "randk(0.25,unbiased)", "had(1024)|lm1(unbiased)"]
)
def test_unbiased_over_seeds(policy):
    """z-test of the mean error over seeds, and the declared variance."""
    x = np.random.default_rng(3).standard_normal(1024).astype(np.float32)
    runs = np.stack([through(x, policy, seed=seed) for seed in range(400)]).astype(np.float64)
    bound = build(parse(policy)).bound
    assert isinstance(bound, Unbiased)
    assert float(((runs - x) ** 2).sum(axis=1).mean()) <= bound.omega * energy(x)
    floor = (
        0.03 if policy.startswith("int2") else 0.004
    )  # a coordinate that happened never to flip has no spread
    deviation = (runs.mean(axis=0) - x) / np.maximum(runs.std(axis=0) / 20, floor)
    assert abs(float(deviation.mean())) < 5 / np.sqrt(1024)
    assert float((np.abs(deviation) < 4.5).mean()) == 1.0


def shapes_of_input() -> dict[str, np.ndarray]:
    rng, n = np.random.default_rng(0), 8 * 4096
    one_hot, two_hot = np.zeros(n), np.zeros(n)
    one_hot[::4096] = 1
    two_hot[::4096] = two_hot[1::4096] = 1
    return {
        "gaussian": rng.standard_normal(n),
        "one hot": one_hot,
        "two hot": two_hot,
        "constant": np.ones(n),
        "heavy": rng.standard_t(2.5, n),
    }


@pytest.mark.parametrize("name", list(shapes_of_input()))
@pytest.mark.parametrize(("bits", "expected"), [(1, 0.3634), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_two_rounds_make_the_distortion_independent_of_the_input(name, bits, expected):
    x = shapes_of_input()[name].astype(np.float32)
    got = np.mean([nmse(x, through(x, f"had(4096)|lm{bits}", seed)) for seed in range(3)])
    assert got == pytest.approx(expected, rel=0.05)
    unbiased = np.mean([nmse(x, through(x, f"had(4096)|lm{bits}(unbiased)", seed)) for seed in range(3)])
    assert unbiased == pytest.approx(expected / (1 - expected), rel=0.05)


def test_one_round_is_not_input_independent():
    x = shapes_of_input()["two hot"].astype(np.float32)
    assert nmse(x, through(x, "had(4096,1)|lm1")) == pytest.approx(0.5, abs=0.01)


def test_hadamard_and_cosine_transforms_are_isometries():
    x = np.random.default_rng(1).standard_normal((4, 4096)).astype(np.float32)
    y = ref_bits.rotate(x.reshape(-1), 4096, 2, 0, 5)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    np.testing.assert_allclose(ref_bits.rotate_back(y, 2, 0, 5), x, atol=2e-5)
    z = transform(x.reshape(-1), basis())
    np.testing.assert_allclose(np.linalg.norm(z.reshape(4, -1), axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    np.testing.assert_allclose(transform(z, basis().T), x.reshape(-1), atol=2e-5)


@settings(max_examples=15, deadline=None)
@given(power=st.integers(-40, 40), seed=st.integers(0, 99))
@pytest.mark.parametrize(
    "policy", ["int4(64,rtn)", "sign(256)", "had(256)|lm2", "topk(64,5)|sign2|rice", "bf16"]
)
def test_scaling_by_a_power_of_two_commutes(policy, power, seed):
    x = np.random.default_rng(seed).standard_normal(512).astype(np.float32)
    scale = np.float32(2.0**power)
    assert (through(x * scale, policy) == through(x, policy) * scale).all()


@pytest.mark.parametrize("policy", ["int8(64,rtn)", "sign(64)", "topk(64,5)|fp32|rice"])
def test_permuting_chunks_permutes_the_output(policy):
    x = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    order = np.random.default_rng(3).permutation(8)
    straight = through(x.reshape(-1), policy).reshape(8, 64)
    assert (through(x[order].reshape(-1), policy).reshape(8, 64) == straight[order]).all()


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(min_size=0, max_size=600),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64", "int64", "uint8", "int16"]),
)
def test_lossless_stages_keep_every_bit_pattern(data, dtype):
    """At codec level also NaN payloads, infinities, subnormals and signed zeros survive."""
    from compression.codecs.lossless import LosslessCodec
    from compression.frame import FrameWriter
    from compression.layout import DTYPES

    size = DTYPES[dtype].itemsize
    part = np.frombuffer(data[: len(data) // size * size], DTYPES[dtype])
    entries = [TensorSpec("w", part.shape, dtype, Role.PARAM)]
    base = [np.roll(part, 1)]
    for codec, bases in ((LosslessCodec(), None), (LosslessCodec(xor=True), base)):
        writer = FrameWriter()
        encoded = codec.encode_bytes(entries, [part], writer, bases)
        sections = writer.take_sections()
        body, views, at = writer._buffer[writer._HEAD : writer._end], {}, 0
        for kind, length in sections:
            views[kind] = body[at : at + length]
            at += length
        assert codec.decode_bytes(views, entries, encoded.nnz, bases)[0].tobytes() == part.tobytes()
        assert isinstance(codec.bound, Exact)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6), seed=st.integers(0, 99))
@pytest.mark.parametrize(
    "policy", ["int8(64,rtn)", "sign(64)", "topk(64,5)|sign2|rice", "had(64)|lm2", "ecsq(rms=0.5)"]
)
def test_a_tensor_is_coded_alike_whatever_travels_beside_it(policy, sizes, seed):
    """Blocks never straddle two tensors (rotations and the global step of ecsq excepted in value, not in
    bound)."""
    rng = np.random.default_rng(seed)
    tensors = {
        f"t{i}": rng.standard_normal(n).astype(np.float32) * np.float32(10.0 ** (i - 3))
        for i, n in enumerate(sizes)
    }
    layout = Layout.from_arrays(tensors)
    received = decode(encode(tensors, layout, f"{policy};min=0"), layout)
    assert parse_policy(f"{policy};min=0").groups(layout)
    for name, x in tensors.items():
        if policy.startswith(("int8", "sign")):
            assert (received[name] == through(x, policy)).all() if x.size else True
        elif not policy.startswith("ecsq"):
            assert energy(received[name].astype(np.float64) - x) <= energy(x) * 1.001 + 1e-12
