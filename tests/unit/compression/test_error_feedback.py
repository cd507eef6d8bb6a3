"""Error feedback: every row of the transaction table, on exact numbers."""

import numpy as np
import pytest

from compression import Layout, decode
from compression.durable import StateError
from compression.feedback import ErrorFeedback, Outcome, frame_id
from umbel.errors import ConfigError

POLICY = "topk(16,4)|fp32|flat;min=0"
LAYOUT = Layout.from_arrays({"w": np.zeros(16, np.float32), "bias": np.zeros(2, np.float32)})


def ramp(scale: float = 1.0) -> dict[str, np.ndarray]:
    return {"w": np.arange(1, 17, dtype=np.float32) * np.float32(scale), "bias": np.ones(2, np.float32)}


def memory(tmp_path, **kwargs) -> ErrorFeedback:
    return ErrorFeedback(tmp_path / "e.safetensors", LAYOUT, POLICY, **kwargs)


def dropped_part() -> np.ndarray:
    return np.where(np.arange(16) < 12, np.arange(1, 17), 0).astype(np.float32)


def test_what_is_not_sent_is_kept_and_sent_later(tmp_path):
    feedback = memory(tmp_path)
    frame = feedback.encode(ramp(), round_index=1)
    assert decode(frame, LAYOUT)["w"].tolist() == [0.0] * 12 + [13, 14, 15, 16]
    assert feedback.residual["w"].tolist() == dropped_part().tolist()
    assert feedback.norm_ratio(ramp()) == pytest.approx(
        np.linalg.norm(dropped_part()) / np.linalg.norm(ramp()["w"])
    )
    assert "bias" not in feedback.residual  # travels exactly, so it leaves none
    assert feedback.settle({frame_id(frame): Outcome.APPLIED}) == [frame_id(frame)]
    second = feedback.encode({"w": np.zeros(16, np.float32), "bias": np.zeros(2, np.float32)}, round_index=2)
    assert decode(second, LAYOUT)["w"].tolist() == [0.0] * 8 + [9, 10, 11, 12] + [0.0] * 4


def test_dropped_gives_the_mass_back_and_rejected_takes_the_update_away(tmp_path):
    for outcome, expected in ((Outcome.DROPPED, ramp()["w"]), (Outcome.REJECTED, np.zeros(16))):
        feedback = ErrorFeedback(tmp_path / outcome, LAYOUT, POLICY)
        frame = feedback.encode(ramp(), round_index=1)
        feedback.settle({frame_id(frame): outcome})
        assert feedback.residual["w"].tolist() == expected.tolist()
        assert feedback.pending == ()


def test_decay_and_a_late_outcome(tmp_path):
    feedback = memory(tmp_path, decay=0.5)
    first = feedback.encode(ramp(), round_index=1)
    zero = {"w": np.zeros(16, np.float32), "bias": np.zeros(2, np.float32)}
    second = feedback.encode(zero, round_index=2)  # p = residual / 2; sends 4.5, 5, 5.5, 6
    assert decode(second, LAYOUT)["w"][8:12].tolist() == [4.5, 5, 5.5, 6]
    feedback.settle({frame_id(first): "dropped"})  # one decay since: half of 13..16 comes back
    assert feedback.residual["w"].tolist() == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 0, 0, 0, 0, 6.5, 7, 7.5, 8]
    feedback.settle({frame_id(second): "rejected"})  # back to before round 2, which now knows about round 1
    assert feedback.residual["w"].tolist() == ramp()["w"].tolist()


def test_rejecting_the_older_of_two_keeps_the_newer(tmp_path):
    feedback = memory(tmp_path)
    first = feedback.encode(ramp(100), round_index=1)
    feedback.encode(ramp(), round_index=2)
    before = feedback.residual["w"]
    feedback.settle({frame_id(first): "rejected"})
    np.testing.assert_allclose(feedback.residual["w"], before - 100 * dropped_part(), rtol=1e-6)


def test_missed_rounds_decay_the_residual(tmp_path):
    feedback = memory(tmp_path, decay=0.5)
    frame = feedback.encode(ramp(), round_index=1)
    feedback.missed(3)
    assert feedback.residual["w"].tolist() == (dropped_part() / 8).tolist()
    feedback.settle({frame_id(frame): "dropped"})
    assert feedback.residual["w"].tolist() == (ramp()["w"] / 8).tolist()


def test_a_restart_gives_the_same_bytes_and_a_new_attempt_starts_over(tmp_path):
    feedback = memory(tmp_path)
    frame = feedback.encode(ramp(), round_index=1, attempt=0)
    again = memory(tmp_path)
    assert again.pending == (frame_id(frame),)
    assert again.encode(ramp(7), round_index=1, attempt=0) == frame  # never a second encode
    retry = again.encode(ramp(2), round_index=1, attempt=1)
    assert decode(retry, LAYOUT)["w"][12:].tolist() == [26, 28, 30, 32]
    assert again.residual["w"].tolist() == (2 * dropped_part()).tolist()  # nothing of attempt 0 is left
    assert again.pending == (frame_id(retry),)


def test_acknowledgements_without_effect(tmp_path, caplog):
    feedback = memory(tmp_path)
    frame = feedback.encode(ramp(), round_index=1)
    caplog.set_level("INFO")
    assert feedback.settle({"ab" * 32: "applied"}) == []
    assert "is unknown here" in caplog.text
    feedback.settle({frame_id(frame): "dropped"})
    kept = feedback.residual["w"].tolist()
    assert memory(tmp_path).settle({frame_id(frame): "dropped"}) == []
    assert "was settled before" in caplog.text
    assert memory(tmp_path).residual["w"].tolist() == kept


def test_a_base_that_moved_too_far_discards_everything_loudly(tmp_path, caplog):
    feedback = memory(tmp_path, max_generation_gap=1)
    feedback.encode(ramp(), round_index=1, generation=0)
    feedback.encode(ramp(), round_index=2, generation=1)
    assert len(feedback.pending) == 2
    feedback.encode(ramp(), round_index=9, generation=3)
    assert "discarded: the base moved from generation 1 to 3" in caplog.text
    assert len(feedback.pending) == 1
    assert feedback.residual["w"].tolist() == dropped_part().tolist()


def test_a_failed_encode_changes_nothing(tmp_path):
    feedback = memory(tmp_path)
    feedback.encode(ramp(), round_index=1)
    before = (tmp_path / "e.safetensors").read_bytes()
    with pytest.raises(ValueError, match="NaN"):
        feedback.encode(ramp(np.nan), round_index=2)
    assert (tmp_path / "e.safetensors").read_bytes() == before
    assert memory(tmp_path).residual["w"].tolist() == dropped_part().tolist()


def test_a_damaged_file_is_never_taken_for_an_empty_one(tmp_path):
    memory(tmp_path).encode(ramp(), round_index=1)
    path = tmp_path / "e.safetensors"
    good = path.read_bytes()
    for bad in (good[:-5], good[:-1] + bytes([good[-1] ^ 1]), b""):
        path.write_bytes(bad)
        with pytest.raises(StateError, match="damaged"):
            memory(tmp_path)


def test_a_file_of_another_key_policy_or_layout_is_refused(tmp_path):
    memory(tmp_path, key={"run": "1", "site": "a"}).encode(ramp(), round_index=1)
    with pytest.raises(ConfigError, match="belongs to something else"):
        memory(tmp_path, key={"run": "2", "site": "a"})


@pytest.mark.parametrize(
    "policy", ["int8(256,sr)", "had(4096)|lm2(unbiased)", "randk(0.1,unbiased)", "int8cb", "tok8"]
)
def test_a_residual_on_a_codec_that_must_not_carry_one_is_refused(tmp_path, policy):
    with pytest.raises(ConfigError, match="cannot be kept"):
        ErrorFeedback(tmp_path / "e", LAYOUT, policy)


def test_bf16_updates_lose_nothing_to_their_dtype(tmp_path):
    import ml_dtypes

    layout = Layout.from_arrays({"w": np.zeros(16, ml_dtypes.bfloat16)})
    feedback = ErrorFeedback(tmp_path / "e", layout, "int8(16,rtn);min=0")
    rng, total, applied = np.random.default_rng(0), np.zeros(16), np.zeros(16)
    for round_index in range(1, 40):
        update = (rng.standard_normal(16) * 1e-3).astype(ml_dtypes.bfloat16)
        frame = feedback.encode({"w": update}, round_index=round_index)
        feedback.settle({frame_id(frame): "applied"})
        total += update.astype(np.float64)
        applied += decode(frame, layout)["w"].astype(np.float64)
    np.testing.assert_allclose(applied + feedback.residual["w"], total, atol=1e-8)
