"""D14, H23: on a 4-bit base the carried residual survives 20 rounds; folded into the base it is gone."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lora_quality.carry_vs_folding import NF4, base_matrix, nf4, run


def test_nf4_is_the_nearest_of_sixteen_levels() -> None:
    row = np.linspace(-2, 2, 64, dtype=np.float32)
    want = [2 * NF4[np.argmin(np.abs(NF4 - x / 2))] for x in row]
    assert np.allclose(nf4(row), want)
    assert nf4(np.zeros(64)).tolist() == [0.0] * 64


def test_d14_nf4_loses_nine_per_cent_of_a_gaussian_matrix() -> None:
    base = base_matrix("", (256, 256))
    assert np.linalg.norm(nf4(base) - base) / np.linalg.norm(base) == pytest.approx(0.092, abs=0.004)


@pytest.mark.parametrize("fresh", [False, True])
def test_d14_carry_keeps_what_folding_loses(fresh: bool) -> None:
    """20 rounds of a residual of relative norm .005: less than 1 % lost, against more than 90 %."""
    found = run(base_matrix("", (256, 192)), rounds=20, relative_norm=0.005, fresh=fresh)
    assert found["carry"]["lost"] < 1e-5
    assert found["carry"]["error"] < 1e-5
    assert found["folding"]["lost"] > 0.9


def test_d14_a_large_residual_survives_folding() -> None:
    """The control: what is larger than the quantiser's step is kept, so that the loss above is the quantiser's."""
    found = run(base_matrix("", (256, 192)), rounds=1, relative_norm=0.3, fresh=False)
    assert found["folding"]["lost"] < 0.05
