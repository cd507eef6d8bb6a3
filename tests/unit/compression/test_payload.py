"""What an update's frame holds: values under an exact codec, a change under a lossy one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import compression
from compression import FrameError, Layout
from compression.payload import change, decode_update, delta_layout, is_exact, payload_of

RNG = np.random.default_rng(0)
BASE = {
    "w": RNG.normal(size=(128, 64)).astype(np.float32),
    "h": RNG.normal(size=(64, 96)).astype(ml_dtypes.bfloat16),
    "n": np.array(3),
}
LOCAL = {
    "w": BASE["w"] + np.float32(1e-3),
    "h": (BASE["h"].astype(np.float32) * 1.25).astype(ml_dtypes.bfloat16),
    "n": np.array(5),
}
LAYOUT = Layout.from_arrays(BASE)


@pytest.mark.parametrize(
    ("spec", "exact"), [("exact", True), ("lossless", True), ("int8(256,rtn)", False), ("bf16", False)]
)
def test_exact_codecs_send_values_lossy_ones_changes(spec, exact) -> None:
    assert is_exact(spec) is exact
    assert payload_of(spec) == ("value" if exact else "delta")


@pytest.mark.parametrize("spec", ["exact", "lossless"])
def test_values_come_back_bit_for_bit(spec) -> None:
    got = decode_update(compression.encode(LOCAL, LAYOUT, spec), LAYOUT, spec, BASE)
    assert all(got[n].tobytes() == LOCAL[n].tobytes() for n in LOCAL)


def test_a_change_is_added_to_the_base_in_float32() -> None:
    """The codec's error is relative to the change, not to the weights."""
    frame = compression.encode(change(LOCAL, BASE, LAYOUT), delta_layout(LAYOUT), "int8(256,rtn)")
    got = decode_update(frame, LAYOUT, "int8(256,rtn)", BASE)
    assert got["w"].dtype == got["h"].dtype == np.float32
    assert np.abs(got["w"] - LOCAL["w"]).max() <= 1e-3 / 127
    step = np.abs(change(LOCAL, BASE, LAYOUT)["h"]).max() / 127
    assert np.abs(got["h"] - LOCAL["h"].astype(np.float32)).max() <= step
    assert got["n"] == 5


def test_a_better_codec_is_welcome_another_is_refused() -> None:
    exact = compression.encode(LOCAL, LAYOUT)
    assert decode_update(exact, LAYOUT, "int8(256,rtn)", BASE)["w"].tobytes() == LOCAL["w"].tobytes()
    other = compression.encode(change(LOCAL, BASE, LAYOUT), delta_layout(LAYOUT), "int4(64,rtn)")
    with pytest.raises(FrameError, match="not the one asked for"):
        decode_update(other, LAYOUT, "int8(256,rtn)", BASE)
