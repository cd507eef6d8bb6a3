"""The downlink: all sites that follow hold the shadow's bits; a gap is an error."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from compression import FrameError, Layout
from compression.downlink import CatchUp, Downlink, apply_delta, chain_hash, digest_of, follow


def model(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((90, 90)).astype(np.float32),
        "half": rng.standard_normal((80, 80)).astype(ml_dtypes.bfloat16),
        "steps": np.array(3, np.int64),
    }


LAYOUT = Layout.from_arrays(model())


def moved(theta: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    step = model(seed)
    return {
        "w": theta["w"] + np.float32(0.01) * step["w"],
        "half": (
            theta["half"].astype(np.float32) + np.float32(0.01) * step["half"].astype(np.float32)
        ).astype(ml_dtypes.bfloat16),
        "steps": theta["steps"] + 1,
    }


@pytest.mark.parametrize(
    "policy", ["int8(256,rtn)", "ecsq(rate=2.0)", "topk(4096,256)|sign2|rice", "exact", "xor", "lossless"]
)
def test_sites_hold_the_shadow_whatever_they_missed(policy):
    theta, down = model(), Downlink(model(), LAYOUT, policy, keep_versions=3)
    sites = [model() for _ in range(3)]
    for version in range(1, 7):
        theta = moved(theta, version)
        assert down.publish(theta, seed=version).number == version
        for number, site in enumerate(sites):
            if version % (number + 1) == 0:  # the third site is two versions behind each time
                sites[number] = follow(site, LAYOUT, down.catch_up(digest_of(site, LAYOUT)))
                assert digest_of(sites[number], LAYOUT) == down.digest
                assert sites[number]["steps"] == theta["steps"]
    error = np.abs(down.shadow["w"] - theta["w"]).max()
    assert error == 0 or policy not in ("exact", "xor", "lossless")
    assert error < 0.05  # the shadow's difference is the residual and does not accumulate


def test_the_shadow_catches_up_when_the_model_stands_still():
    down, theta = Downlink(model(), LAYOUT, "int4(64,rtn)"), moved(model(), 1)
    errors = []
    for version in range(6):
        down.publish(theta, seed=version)
        errors.append(float(np.abs(down.shadow["w"] - theta["w"]).max()))
    assert errors[-1] < 1e-5 * errors[0]


def test_replay_or_snapshot_whichever_is_fewer_bytes():
    theta, down = model(), Downlink(model(), LAYOUT, "int8(256,rtn)", keep_versions=8)
    digests = [down.digest]
    for version in range(1, 6):
        theta = moved(theta, version)
        down.publish(theta)
        digests.append(down.digest)
    assert len(down.catch_up(digests[4]).frames) == 1
    assert down.catch_up(digests[4]).snapshot is None
    assert down.catch_up(digests[0]).snapshot is not None  # five int8 frames exceed one lossless snapshot
    assert down.catch_up("f" * 64).snapshot is not None  # an unknown state is never told to continue
    assert down.catch_up(down.digest).num_bytes == 0
    site = follow(model(9), LAYOUT, down.catch_up("f" * 64))
    assert digest_of(site, LAYOUT) == down.digest


def test_a_gap_or_a_wrong_frame_is_an_error():
    theta, down = model(), Downlink(model(), LAYOUT, "int4(64,rtn)", keep_versions=8)
    for version in range(1, 3):
        theta = moved(theta, version)
        down.publish(theta)
    whole = down.catch_up(digest_of(model(), LAYOUT))
    with pytest.raises(FrameError) as caught:
        follow(model(), LAYOUT, replace(whole, frames=whole.frames[1:]))
    assert caught.value.code == "gap"
    with pytest.raises(FrameError) as caught:
        follow(model(), LAYOUT, replace(whole, frames=whole.frames[:1]))
    assert caught.value.code == "digest"
    lied = replace(whole.frames[0], digest="0" * 64)
    with pytest.raises(FrameError) as caught:
        follow(model(), LAYOUT, CatchUp(None, (lied,), whole.digest, whole.chain))
    assert caught.value.code == "digest"


def test_the_chain_depends_on_every_frame_and_their_order():
    start = "0" * 64
    assert chain_hash(chain_hash(start, b"a"), b"b") != chain_hash(chain_hash(start, b"b"), b"a")
    down = Downlink(model(), LAYOUT, "exact")
    version = down.publish(model())
    assert version.chain == down.chain == chain_hash(start, version.frame)


def test_state_survives_a_checkpoint():
    down = Downlink(model(), LAYOUT, "int4(64,rtn)", keep_versions=4)
    down.publish(moved(model(), 1))
    arrays, document = down.state()
    other = Downlink(model(5), LAYOUT, "int4(64,rtn)", keep_versions=4)
    other.restore(arrays, document)
    theta = moved(moved(model(), 1), 2)
    assert other.publish(theta, seed=2) == down.publish(theta, seed=2)
    assert other.digest == down.digest


def test_apply_delta_keeps_shapes_and_dtypes():
    result = apply_delta(model(), model(1), LAYOUT)
    assert {k: (v.dtype, v.shape) for k, v in result.items()} == {
        k: (v.dtype, v.shape) for k, v in model().items()
    }
