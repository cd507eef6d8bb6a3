"""The budget of a link and the codec chosen for it."""

import numpy as np
import pytest

from compression import Layout, encode
from compression.budget import Goodput, choose


def update(kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.laplace(size=(512, 512)) if kind == "laplace" else np.sign(rng.standard_normal((512, 512)))
    return {"w": x.astype(np.float32) * np.float32(1e-3), "bias": np.ones(100, np.float32)}


def test_goodput_is_smoothed_and_ignores_nonsense():
    link = Goodput(share=0.5)
    assert link.budget_bytes(10, 1) is None
    link.observe(1000, 1.0)
    link.observe(1000, 0.0)
    link.observe(3000, 1.0)
    assert link.bytes_per_second == 2000
    assert link.budget_bytes(seconds_left=12, compute_seconds=5, rtt_seconds=0.5, num_objects=4) == 10000
    assert link.budget_bytes(seconds_left=3, compute_seconds=5) == 0


@pytest.mark.parametrize("factor", [0.003, 0.02, 0.07, 0.12, 0.3, 1.2])
def test_the_frame_fits_its_budget(factor):
    arrays = update("laplace")
    layout = Layout.from_arrays(arrays)
    budget = int(layout.raw_bytes * factor)
    choice = choose(arrays, layout, budget)
    assert len(encode(arrays, layout, choice.policy)) <= budget * 1.02 + 600


def test_more_bytes_never_lose_more():
    arrays = update("laplace")
    layout = Layout.from_arrays(arrays)
    losses = [
        choose(arrays, layout, int(layout.raw_bytes * f)).nmse for f in (0.01, 0.03, 0.06, 0.13, 0.3, 1.1)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0.0


def test_a_sign_like_update_is_sent_as_signs_and_a_peaked_one_is_not():
    chosen = {}
    for kind in ("laplace", "signs"):
        arrays = update(kind)
        layout = Layout.from_arrays(arrays)
        chosen[kind] = choose(arrays, layout, int(layout.raw_bytes * 1.03 / 32) + 400).policy
    assert chosen["laplace"].startswith("ecsq")
    assert chosen["signs"] == "sign(4096)"


def test_ten_times_less_bandwidth_gives_a_higher_ratio():
    arrays = update("laplace")
    layout = Layout.from_arrays(arrays)
    link, ratios = Goodput(share=0.9), []
    for rate in (1.25e6, 1.25e6, 1.25e5, 1.25e5):  # 10 and then 1 Mbit/s
        link.observe(100_000, 100_000 / rate)
        choice = choose(arrays, layout, link.budget_bytes(seconds_left=0.3, compute_seconds=0.0))
        ratios.append(layout.raw_bytes / len(encode(arrays, layout, choice.policy)))
    assert min(ratios[2:]) > 2 * max(ratios[:2])


def test_nothing_lossy_means_exact():
    arrays = {"bias": np.ones(10, np.float32)}
    assert choose(arrays, Layout.from_arrays(arrays), 10).policy == "exact"
