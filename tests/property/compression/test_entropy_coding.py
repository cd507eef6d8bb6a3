"""rANS against an independent implementation, Rice against the flat form, and the rate control against real
sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compression import FrameError, Layout, Role, TensorSpec, decode, encode, read_header
from compression import rans_tables as rans
from compression.kernels import ref_ecsq, ref_topk
from compression.rate import RateModel

pytestmark = pytest.mark.codec


def laplace(numel: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).laplace(size=numel).astype(np.float32)


def body_bits(frame: bytes, numel: int) -> float:
    """Bits a value without the frame's fixed header and checksum."""
    return 8 * (len(frame) - read_header(frame).body_offset - 8) / numel


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 1 << 18), min_size=256, max_size=256).filter(any))
def test_frequencies_sum_to_4096_and_spare_every_used_symbol(counts):
    counts = np.array(counts, np.int64)
    freqs = rans.normalise(counts)
    assert freqs.sum() == 4096
    assert ((freqs > 0) == (counts > 0)).all()
    back, used = rans.read_table(rans.write_table(freqs))
    assert (back == freqs).all()
    assert used == rans.write_table(freqs).size


@settings(max_examples=60, deadline=None)
@given(symbols=st.binary(min_size=1, max_size=300), narrow=st.booleans())
def test_rans_round_trip(symbols, narrow):
    data = np.frombuffer(symbols, np.uint8) % (5 if narrow else 255) + 1
    data = data.astype(np.uint8)
    freqs = rans.normalise(np.bincount(data, minlength=256))
    states, words = np.zeros(8, np.uint32), np.empty(data.size + 8, np.uint16)
    stream = words[ref_ecsq.rans_encode(data, freqs, states, words) :]
    values, out = np.arange(256, dtype=np.float32), np.empty(data.size, np.float32)
    table = rans.decode_table(freqs)
    assert ref_ecsq.rans_decode(stream, states, table, values, out) == stream.size
    assert (out == data).all()
    if stream.size:
        assert ref_ecsq.rans_decode(stream[:-1], states, table, values, out) == -1


@pytest.mark.parametrize("step", [0.25, 1.0, 3.0])
def test_rans_length_is_within_half_a_percent_of_constriction(step):
    constriction = pytest.importorskip("constriction")
    from compression.kernels import kernels

    x = laplace(1 << 18)
    symbols, counts, sums = np.empty(x.size, np.uint8), np.zeros(256, np.int64), np.zeros(3, np.int64)
    run_on = kernels(x.size, heavy=True)
    assert run_on.ecsq_quantise(x, np.float32(step), np.float32(0.5), symbols, counts, sums) == -1
    freqs, states, words = rans.normalise(counts), np.zeros(8, np.uint32), np.empty(x.size + 8, np.uint16)
    ours = 16 * (words.size - run_on.rans_encode(symbols, freqs, states, words)) + 8 * 32
    model = constriction.stream.model.Categorical((counts / counts.sum()).astype(np.float32), perfect=False)
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(symbols.astype(np.int32), model)
    assert ours <= 1.005 * coder.num_bits()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4095), min_size=1, max_size=200, unique=True), st.integers(0, 12))
def test_rice_is_lossless_against_the_flat_form(indices, r):
    index = np.sort(np.array(indices)).astype(np.uint16)
    keep, limits = np.array([index.size]), np.array([4096])
    gaps = ref_topk.gaps_of(index, keep)
    out = np.empty(int((gaps >> r).sum()) // 8 + gaps.size * (r + 1) // 8 + 9, np.uint8)
    data = out[: ref_topk.rice_encode(gaps, r, out)].copy()
    back = np.zeros(index.size, np.uint16)
    assert ref_topk.rice_decode(data, r, keep, limits, back) == 0
    assert (back == index).all()
    assert ref_topk.rice_decode(data, r, keep, np.array([int(index[-1])]), back) == -1  # beyond the chunk


@pytest.mark.parametrize(("k", "bits"), [(16, 9.418), (32, 8.474), (64, 7.496), (128, 6.495), (256, 5.472)])
def test_rice_bits_per_index_on_uniform_supports(k, bits):
    """The table of bits per coded index for k of 4096, and the best parameter."""
    rng = np.random.default_rng(0)
    keep = np.full(64, k)
    index = np.concatenate([np.sort(rng.permutation(4096)[:k]) for _ in range(64)]).astype(np.uint16)
    gaps = ref_topk.gaps_of(index, keep)
    r = ref_topk.rice_parameter(gaps)
    assert r == {16: 7, 32: 6, 64: 5, 128: 4, 256: 3}[k]
    assert ((gaps >> r).sum() + gaps.size * (r + 1)) / gaps.size == pytest.approx(bits, rel=0.01)


def test_sparse_64_of_4096_is_at_least_210_times_smaller_than_fp32():
    x = laplace(1 << 20).reshape(1024, 1024)
    layout = Layout.from_arrays({"w": x})
    frame = encode({"w": x}, layout, "topk(4096,64)|sign2|rice")
    assert x.nbytes / len(frame) >= 210
    exact = decode(encode({"w": x}, layout, "topk(4096,64)|fp32|rice"), layout)["w"]
    coarse = decode(frame, layout)["w"]
    energy = float((x.astype(np.float64) ** 2).sum())
    loss = [float(((y - x).astype(np.float64) ** 2).sum()) / energy for y in (exact, coarse)]
    assert loss[1] - loss[0] < 0.03  # on these exponential tails two levels cost more than on real updates


@pytest.mark.parametrize("shape", ["laplace", "gaussian", "layers of different scale"])
@pytest.mark.parametrize("bits", [0.2, 1.0, 2.0, 3.9])
def test_a_byte_budget_is_met_within_two_percent(shape, bits):
    rng, n = np.random.default_rng(1), 1 << 19
    x = laplace(n) if shape == "laplace" else rng.standard_normal(n).astype(np.float32)
    if shape.startswith("layers"):
        x *= np.repeat(10.0 ** rng.uniform(-0.7, 0.7, 8), n // 8).astype(np.float32)
    layout = Layout((TensorSpec("w", x.shape, "float32", Role.DELTA),))
    got = body_bits(encode({"w": x}, layout, f"ecsq(rate={bits})|rans"), n)
    assert got == pytest.approx(bits, rel=0.02)


@pytest.mark.parametrize("step", [0.1, 0.5, 1.0, 2.0, 6.0])
def test_predicted_rate_and_distortion_are_the_real_ones(step):
    x = laplace(1 << 18, seed=4)
    counts = np.zeros((1, 2048), np.int64)
    assert ref_ecsq.log_histogram(x, counts[0]) == -1
    predicted = RateModel(counts).predict(step, 0.5)
    layout = Layout((TensorSpec("w", x.shape, "float32", Role.DELTA),))
    frame = encode({"w": x}, layout, f"ecsq(step={step},theta=0.5)|rans")
    error = (decode(frame, layout)["w"] - x).astype(np.float64)
    assert body_bits(frame, x.size) == pytest.approx(predicted.bits, rel=0.02)
    assert float((error**2).sum() / (x.astype(np.float64) ** 2).sum()) == pytest.approx(
        predicted.nmse, rel=0.03
    )


def test_an_all_zero_update_costs_almost_nothing_at_any_rate():
    x = np.zeros((512, 1024), np.float32)
    layout = Layout.from_arrays({"w": x})
    for policy in (
        "ecsq(rate=2.0)",
        "ecsq(rms=0.5)",
        "topk(4096,64)|sign2|rice",
        "sign(4096)",
        "had(4096)|lm2",
    ):
        frame = encode({"w": x}, layout, policy)
        assert not decode(frame, layout)["w"].any(), policy
        if policy.startswith("ecsq"):
            assert len(frame) < 600


def test_illegal_tables_are_refused():
    good = rans.write_table(rans.normalise(np.bincount([1, 1, 2, 3], minlength=256)))
    for bad in (
        good[:0],
        good[:-1],
        np.concatenate([good[:1], good[1:] - 1]),
        np.array([5 | 2 << 8], np.uint16),
    ):
        with pytest.raises(FrameError):
            rans.read_table(bad)
