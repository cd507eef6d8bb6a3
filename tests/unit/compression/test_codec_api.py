"""encode, decode, accumulate on whole tensor sets, every codec (hazards H09, H14, H16, H17, H24, H27)."""

import ml_dtypes
import numpy as np
import pytest

from compression import (
    DEFAULT_LIMITS,
    EncodeError,
    FrameError,
    FrameWriter,
    Layout,
    Limits,
    NonFiniteError,
    Role,
    accumulate,
    accumulate_many,
    decode,
    encode,
    encode_into,
    predict_bytes,
    read_header,
)

FIXED_RATE = [
    "exact",
    "bf16",
    "fp16",
    "fp32",
    "int8(256,rtn)",
    "int8(64,sr)",
    "int4(64,rtn)",
    "int4(64,sr)",
    "int2(256,rtn)",
    "int8cb",
    "sign(4096)",
    "had(4096)|lm1",
    "had(1024)|lm2(unbiased)",
    "had(256)|lm3",
    "had(64)|lm4",
    "topk(4096,64)|fp32|flat",
    "topk(256,16)|sign2|flat",
    "dct|topk(4096,64)|bf16|flat",
    "lowrank(4)",
]
VARIABLE_RATE = [
    "lossless",
    "randk(0.1)",
    "topk(4096,64)|sign2|rice",
    "topk(1024,10)|bf16|rice",
    "dct|topk(4096,64)|sign2|rice",
    "ecsq(rate=2.0)",
    "ecsq(rms=0.25)|zstd",
    "ecsq(step=0.5)|rans",
]
# largest NMSE each may have on normal values; the tight bounds are in the property tests
NMSE = {
    "bf16": 1e-5,
    "fp16": 1e-6,
    "int8": 2e-4,
    "int4": 0.03,
    "lm1": 0.6,
    "lm2": 0.14,
    "lm3": 0.04,
    "lm4": 0.02,
}


def mixed_set(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "layer.weight": rng.standard_normal((97, 64)).astype(np.float32),
        "layer.bias": rng.standard_normal(97).astype(np.float32),
        "norm.weight": rng.standard_normal(5000).astype(np.float32),
        "half": rng.standard_normal((70, 70)).astype(ml_dtypes.bfloat16),
        "steps": np.array(13, np.int64),
        "mask": np.array([True, False, True]),
        "empty": np.zeros((0, 4), np.float32),
        "view": rng.standard_normal((130, 80)).astype(np.float32)[::2, ::-1],
    }


@pytest.mark.parametrize("policy", FIXED_RATE + VARIABLE_RATE)
def test_h27_every_codec_carries_a_mixed_set(policy):
    arrays = mixed_set()
    before = {name: array.tobytes() for name, array in arrays.items()}
    layout = Layout.from_arrays(arrays)
    frame = encode(arrays, layout, policy, seed=3, round_index=2, base="b")
    assert {name: array.tobytes() for name, array in arrays.items()} == before  # inputs are not modified
    assert frame == encode(
        arrays, layout, policy, seed=3, round_index=2, base="b"
    )  # encoding is deterministic
    received = decode(frame, layout)
    assert list(received) == [e.name for e in layout.entries]
    for name, array in arrays.items():
        assert received[name].dtype == array.dtype, name
        assert received[name].shape == array.shape, name
        assert received[name].flags.writeable
    for name in ("layer.bias", "norm.weight", "steps", "mask", "empty"):  # fixed part of every policy
        assert received[name].tobytes() == arrays[name].tobytes(), name
    error = layout.flatten(received, np.float64) - layout.flatten(arrays, np.float64)
    nmse = float((error**2).sum() / (layout.flatten(arrays, np.float64) ** 2).sum())
    limit = next((v for key, v in NMSE.items() if policy.startswith(key) or f"|{key}" in policy), 1.0)
    limit = 1.0 if "topk" in policy else limit
    assert nmse <= limit * (4 if "randk" in policy else 1)
    header = read_header(frame)
    assert (header.round_index, header.base, header.numel) == (2, "b", layout.numel)
    total = np.ones(layout.numel)
    accumulate(frame, layout, total, 0.25)
    expected = 1 + 0.25 * layout.flatten(received, np.float64)
    np.testing.assert_allclose(total, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("policy", FIXED_RATE)
def test_predicted_size_is_the_real_size(policy):
    arrays = mixed_set()
    layout = Layout.from_arrays(arrays)
    frame = encode(arrays, layout, policy, seed=77, round_index=12, base="base")
    assert predict_bytes(layout, policy, seed=77, round_index=12, base="base") == len(frame)


@pytest.mark.parametrize("policy", VARIABLE_RATE)
def test_size_of_a_variable_rate_is_not_predicted(policy):
    assert predict_bytes(Layout.from_arrays(mixed_set()), policy) is None


def test_h14_h16_exact_keeps_every_dtype_bit_for_bit():
    arrays = {
        "bf16": np.arange(-3, 3).astype(ml_dtypes.bfloat16) / ml_dtypes.bfloat16(7),
        "fp16": np.array([1e-7, -65504], np.float16),
        "f64": np.array([[1e300, -0.0]]),
        "scalar": np.array(10, np.int64),
        "u8": np.array([0, 255], np.uint8),
        "bool": np.array([[True], [False]]),
        "empty": np.zeros((0, 4), np.int32),
        "zero_d": np.array(-0.0, np.float32),
    }
    layout = Layout.from_arrays(arrays)
    frame = encode(arrays, layout)
    received = decode(frame, layout)
    for name, array in arrays.items():
        assert (received[name].dtype, received[name].shape) == (array.dtype, array.shape)
        assert received[name].tobytes() == array.tobytes()
    assert len(frame) == layout.raw_bytes + 8 + 12 + len(read_header(frame).to_bytes())


def test_h09_framing_of_an_exact_exchange_is_below_a_thousandth():
    arrays = {f"layer.{i}.weight": np.ones((64, 64), np.float32) for i in range(40)}
    layout = Layout.from_arrays(arrays)
    assert len(encode(arrays, layout)) - layout.raw_bytes < 300  # nothing per tensor in the header


@pytest.mark.parametrize("length", [0, 1, 50, 4097])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_h17_ones_come_back_from_int8(length, dtype):
    ones = np.ones((length, 2), np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)[:, 0]
    layout = Layout.from_arrays({"w": ones})
    received = decode(encode({"w": ones}, layout, "int8(256,rtn);min=0"), layout)["w"]
    assert received.dtype == ones.dtype
    np.testing.assert_allclose(received.astype(np.float64), 1.0, atol=1e-3 if dtype != "bfloat16" else 4e-3)
    assert read_header(encode({"w": ones}, layout, "int8(256,rtn);min=0")).policy == "int8(256,rtn);min=0"


@pytest.mark.parametrize("policy", [*FIXED_RATE, *VARIABLE_RATE])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_h24_a_non_finite_value_is_refused_by_tensor_name(policy, bad):
    arrays = mixed_set()
    arrays["view"] = arrays["view"].copy()
    arrays["view"][30, 7] = bad
    with pytest.raises(NonFiniteError) as caught:
        encode(arrays, Layout.from_arrays(arrays), policy)
    assert caught.value.tensor == "view"


@pytest.mark.parametrize(("policy", "value"), [("fp16", 1e5), ("bf16", 3.4e38), ("int2(256,rtn)", 3.4e38)])
def test_overflow_is_refused_not_saturated(policy, value):
    arrays = {"w": np.full((64, 64), value, np.float32)}
    with pytest.raises(EncodeError) as caught:
        encode(arrays, Layout.from_arrays(arrays), policy)
    assert caught.value.tensor == "w"


def test_ecsq_refuses_a_step_that_needs_more_than_127_levels():
    arrays = {"w": np.full((64, 64), 1.0, np.float32)}
    with pytest.raises(EncodeError, match="127 steps"):
        encode(arrays, Layout.from_arrays(arrays), "ecsq(step=0.001)|rans")


def test_scales_of_neighbouring_tensors_do_not_mix():
    rng = np.random.default_rng(1)
    small = rng.standard_normal(5000).astype(np.float32) * np.float32(1e-4)
    arrays = {"a": rng.standard_normal((71, 71)).astype(np.float32), "b": small}
    layout = Layout.from_arrays(arrays)
    for policy, limit in [("int8(256,rtn)", 1e-4), ("sign(4096)", 0.45), ("had(4096)|lm2", 0.13)]:
        received = decode(encode(arrays, layout, policy), layout)["b"]
        assert float(((received - small) ** 2).sum() / (small**2).sum()) < limit, policy


def test_policy_by_role_gives_each_factor_its_codec():
    arrays = {"lora_A": np.ones((64, 64), np.float32), "lora_B": np.ones((64, 64), np.float32) / 3}
    layout = Layout.from_arrays(arrays)
    frame = encode(arrays, layout, "lora_a=int8(256,sr);lora_b=bf16")
    assert read_header(frame).specs == ("int8(256,sr)", "bf16")
    received = decode(frame, layout)
    assert float(received["lora_B"][0, 0]) == 0.333984375  # 1/3 in bf16


def test_tokens_have_their_own_scales():
    h = np.ones((1, 60, 96), np.float32)
    h[0, 5] = 1000.0  # one outlier token
    layout = Layout.from_arrays({"h": h}, lambda name: Role.ACTIVATION)
    received = decode(encode({"h": h}, layout, "tok8(rtn)"), layout)["h"]
    assert np.abs(received[0, 4] - 1).max() < 1e-3
    assert layout.raw_bytes / len(encode({"h": h}, layout, "tok8(rtn)")) > 3.7


def test_xor_needs_and_checks_its_base():
    rng = np.random.default_rng(2)
    base = {"w": rng.standard_normal((80, 80)).astype(ml_dtypes.bfloat16)}
    new = {"w": base["w"].copy()}
    new["w"][::4] = rng.standard_normal((20, 80)).astype(ml_dtypes.bfloat16)
    layout = Layout.from_arrays(new)
    with pytest.raises(EncodeError, match="base_arrays"):
        encode(new, layout, "xor")
    frame = encode(new, layout, "xor", base="v1", base_arrays=base)
    assert len(frame) < 0.5 * layout.raw_bytes
    assert decode(frame, layout, base="v1", base_arrays=base)["w"].tobytes() == new["w"].tobytes()
    for kwargs in ({}, {"base": "v2", "base_arrays": base}):
        with pytest.raises(FrameError) as caught:
            decode(frame, layout, **kwargs)
        assert caught.value.code == "base"


def test_many_frames_add_like_one_after_the_other():
    layout = Layout.from_arrays(mixed_set())
    frames = [
        encode(mixed_set(s), layout, p, seed=s)
        for s, p in enumerate(["int8", "int8", "sign", "ecsq(rate=1)"])
    ]
    weights = [0.1, 0.2, 0.3, 0.4]
    one, many = np.zeros(layout.numel), np.zeros(layout.numel)
    for frame, weight in zip(frames, weights):
        accumulate(frame, layout, one, weight)
    accumulate_many(frames, layout, many, weights)
    assert one.tobytes() == many.tobytes()
    one[:], many[:] = 0, 0
    for frame, weight in zip(frames[:2], weights):
        accumulate(frame, layout, one, weight)
    accumulate_many(frames[:2], layout, many, weights[:2])
    assert one.tobytes() == many.tobytes()


def test_a_bad_frame_leaves_the_sum_as_it_was():
    arrays = {"w": np.random.default_rng(3).standard_normal((600, 600)).astype(np.float32)}
    layout = Layout.from_arrays(arrays)
    good, other = (
        encode(arrays, layout, "ecsq(rate=2)"),
        Layout.from_arrays({"w": np.zeros((5, 5), np.float32)}),
    )
    total = np.full(layout.numel, 0.5)
    for frame in (good[:-9], encode({"w": np.zeros((5, 5), np.float32)}, other)):
        with pytest.raises(FrameError):
            accumulate_many([good, frame], layout, total, [1.0, 1.0])
    assert (total == 0.5).all()


def test_sum_must_be_float64_of_the_layouts_size():
    layout = Layout.from_arrays(mixed_set())
    with pytest.raises(ValueError, match="float64"):
        accumulate(encode(mixed_set(), layout), layout, np.zeros(layout.numel, np.float32), 1.0)


def test_writer_and_output_are_reused_without_a_trace():
    arrays, other = mixed_set(0), mixed_set(1)
    layout = Layout.from_arrays(arrays)
    writer = FrameWriter()
    for policy in ("exact", "int4", "lossless", "topk(4096,64)|sign2|rice"):
        assert bytes(encode_into(writer, other, layout, policy)) == encode(other, layout, policy)
        out = {name: np.array(array, order="C") for name, array in arrays.items()}
        received = decode(encode(other, layout, policy), layout, out=out)
        fresh = decode(encode(other, layout, policy), layout)
        assert all(received[name].tobytes() == fresh[name].tobytes() for name in fresh)
        assert all(np.shares_memory(received[name], out[name]) for name in out if out[name].size)


def test_limits_are_checked_before_anything_else():
    layout = Layout.from_arrays(mixed_set())
    frame = encode(mixed_set(), layout)
    for limits in (Limits(max_frame_bytes=len(frame) - 1), Limits(max_numel=layout.numel - 1)):
        with pytest.raises(FrameError) as caught:
            decode(frame, layout, limits=limits)
        assert caught.value.code == "too_large"
    assert decode(frame, layout, limits=DEFAULT_LIMITS).keys() == {e.name for e in layout.entries}
