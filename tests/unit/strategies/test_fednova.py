"""FedNova in the mean of the sites: by hand, equal steps, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from compression import Layout
from strategies import SiteUpdate, build
from umbel.config import resolve
from umbel.errors import ConfigError

NAMES = ("m.lora_A.weight", "m.lora_B.weight")
STATE = {
    NAMES[0]: np.full((1, 2), 10.0, np.float32),
    NAMES[1]: np.full((3, 1), -4.0, np.float32),
}


def aggregate(moves, weights, steps, *overrides: str) -> dict[str, np.ndarray]:
    config = resolve(None, ["lora.rank=1", "lora.alpha=2", "run.method=fedit", *overrides])
    strategy = build(config, Layout.from_arrays(STATE), {"m": 2.0})
    updates = [
        SiteUpdate(f"site-{i}", w, {n: a + np.float32(d) for n, a in STATE.items()}, steps=t)
        for i, (d, w, t) in enumerate(zip(moves, weights, steps, strict=True))
    ]
    return strategy.aggregate(STATE, updates).state


def test_each_site_counts_by_its_mean_step() -> None:
    """p = (1/4, 3/4), t = (2, 8): t_eff = 6.5, move = 6.5 (1/4 x 4/2 + 3/4 x 8/8) = 8.125; the plain mean is 7."""
    found = aggregate((4.0, 8.0), (1.0, 3.0), (2, 8), "server.step-weights=fednova")
    for name in NAMES:
        assert np.allclose(found[name] - STATE[name], 8.125, rtol=0, atol=1e-5)
    plain = aggregate((4.0, 8.0), (1.0, 3.0), (2, 8))
    assert np.allclose(plain[NAMES[0]] - STATE[NAMES[0]], 7.0, rtol=0, atol=1e-5)


def test_sites_with_the_same_pace_serve_the_mean_pace_whatever_their_steps() -> None:
    """d_i = 0.5 t_i: the objective is not bent, the move is 0.5 t_eff."""
    weights, steps = (5.0, 2.0, 1.0), (1, 4, 16)
    found = aggregate([0.5 * t for t in steps], weights, steps, "server.step-weights=fednova")
    mean = sum(w * t for w, t in zip(weights, steps, strict=True)) / sum(weights)
    assert np.allclose(found[NAMES[1]] - STATE[NAMES[1]], 0.5 * mean, rtol=1e-6)


def test_equal_steps_are_the_plain_mean() -> None:
    nova = aggregate((0.3, -0.7), (2.0, 5.0), (4, 4), "server.step-weights=fednova")
    plain = aggregate((0.3, -0.7), (2.0, 5.0), (4, 4))
    assert all(np.allclose(nova[n], plain[n], rtol=1e-7) for n in NAMES)


@pytest.mark.parametrize(
    "setting",
    ["run.method=carry", "clients.normalise=fixed", "clients.merge=coordinate-median", "privacy.clip-norm=1"],
)
def test_another_rule_in_the_place_of_the_mean_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="step-weights"):
        resolve(None, ["server.step-weights=fednova", setting, "clients.minimum=8"])
