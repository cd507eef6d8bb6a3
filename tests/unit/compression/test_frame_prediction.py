"""Sizes of frames before there is anything to encode."""

from __future__ import annotations

import numpy as np
import pytest

from compression import Layout, encode
from compression.prediction import SAMPLE_VALUES, expected_bytes
from umbel.errors import ConfigError

FIXED = (
    "exact",
    "bf16",
    "int8(256,rtn)",
    "int4(64,sr)",
    "sign(4096)",
    "topk(4096,64)|sign2|flat",
    "lowrank(4)",
)
VARIABLE = ("ecsq(rate=2.0)", "topk(4096,64)|sign2|rice", "randk(0.125,unbiased)")


def arrays(rows: int = 64) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    return {
        "w": (1e-2 * draw.standard_normal((rows, 512))).astype(np.float32),
        "bias": draw.standard_normal(512).astype(np.float32),
        "steps": np.arange(3),
    }


@pytest.mark.parametrize("policy", FIXED)
def test_a_fixed_rate_is_predicted_to_the_byte(policy: str) -> None:
    given = arrays()
    layout = Layout.from_arrays(given)
    frame = encode(given, layout, policy, seed=99, round_index=12, base="a" * 32)
    assert expected_bytes(layout, policy, seed=99, round_index=12, base="a" * 32) == (len(frame), True)


@pytest.mark.parametrize("policy", VARIABLE)
def test_other_rates_are_estimated_and_said_to_be(policy: str) -> None:
    """Normal values against an estimate from Laplace noise: within 5 %."""
    given = arrays()
    layout = Layout.from_arrays(given)
    found = expected_bytes(layout, policy, seed=5)
    assert not found.exact
    assert found.num_bytes == pytest.approx(len(encode(given, layout, policy, seed=5)), rel=0.05)


def test_a_large_layout_is_estimated_from_a_part_of_it() -> None:
    shapes = {"w": np.broadcast_to(np.zeros((), np.float32), (SAMPLE_VALUES // 512 * 8, 512))}
    layout = Layout.from_arrays(shapes)
    found = expected_bytes(layout, "ecsq(rate=2.0)")
    assert found.num_bytes == pytest.approx(layout.numel * 2 / 8, rel=0.03)


def test_an_illegal_policy_is_refused() -> None:
    with pytest.raises(ConfigError):
        expected_bytes(Layout.from_arrays(arrays()), "int8(64,rtn)|rice")
