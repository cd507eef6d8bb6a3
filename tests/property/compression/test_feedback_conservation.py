"""Sum of applied + residual = sum of updates, for any order of applied, dropped, duplicated, restarted,
rejected."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compression import Layout, decode
from compression.feedback import ErrorFeedback, frame_id

pytestmark = pytest.mark.codec

LAYOUT = Layout.from_arrays(
    {"a": np.zeros((9, 8), np.float32), "b": np.zeros(40, np.float32), "bias": np.zeros(3, np.float32)}
)
POLICIES = [
    "int2(16,rtn);min=0",
    "topk(16,2)|sign2|rice;min=0",
    "sign(16);min=0",
    "had(64)|lm1;min=0",
    "ecsq(rate=1.0);min=0",
]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["encode", "applied", "dropped", "rejected", "repeat", "restart", "retry"]),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=14,
)


def flat(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([arrays[name].reshape(-1).astype(np.float64) for name in ("a", "b")])


@settings(max_examples=25, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 1000))
@pytest.mark.parametrize("policy", POLICIES)
def test_conservation(policy, events, seed):
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "e.safetensors"
        feedback = ErrorFeedback(path, LAYOUT, policy)
        updates, frames, applied = {}, {}, np.zeros(112)
        outcomes: dict[str, str] = {}
        number = 0
        for event, pick in [*events, ("encode", 0)]:
            open_ids = list(feedback.pending)
            if event in ("encode", "retry"):
                retry = event == "retry" and open_ids
                if retry:
                    old = open_ids[pick % len(open_ids)]
                    round_index, attempt = updates[old][0], updates[old][1] + 1
                    outcomes[old] = "rejected"  # a new attempt withdraws the old one
                else:
                    number += 1
                    round_index, attempt = number, 0
                update = {e.name: rng.standard_normal(e.shape).astype(np.float32) for e in LAYOUT.entries}
                frame = feedback.encode(update, round_index=round_index, attempt=attempt, seed=number)
                updates[frame_id(frame)] = (round_index, attempt, flat(update))
                frames[frame_id(frame)] = frame
            elif event == "restart":
                feedback = ErrorFeedback(path, LAYOUT, policy)
            elif event == "repeat" and outcomes:
                sha = list(outcomes)[pick % len(outcomes)]
                assert feedback.settle({sha: "dropped"}) == []  # whatever is said again has no effect
            elif open_ids and event in ("applied", "dropped", "rejected"):
                sha = open_ids[pick % len(open_ids)]
                feedback.settle({sha: event})
                outcomes[sha] = event
                if event == "applied":
                    applied += flat(decode(frames[sha], LAYOUT))
        total = sum(
            (u for sha, (_, _, u) in updates.items() if outcomes.get(sha) != "rejected"), np.zeros(112)
        )
        waiting = sum((flat(decode(frames[sha], LAYOUT)) for sha in feedback.pending), np.zeros(112))
        kept = flat(feedback.residual)
        # rejecting an update whose frame was applied is impossible; rejected mass is neither applied nor kept
        scale = max(1.0, float(sum(np.abs(u).max() for _, _, u in updates.values())))
        assert np.abs(applied + waiting + kept - total).max() <= 1e-6 * scale


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), decay=st.sampled_from([1.0, 0.95, 0.5]))
def test_decoded_plus_new_residual_is_what_was_encoded(seed, decay):
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        feedback = ErrorFeedback(Path(folder) / "e", LAYOUT, POLICIES[0], decay=decay)
        for number in range(1, 5):
            before = flat(feedback.residual)
            update = {e.name: rng.standard_normal(e.shape).astype(np.float32) for e in LAYOUT.entries}
            frame = feedback.encode(update, round_index=number)
            p = decay * before + flat(update)
            np.testing.assert_allclose(flat(decode(frame, LAYOUT)) + flat(feedback.residual), p, atol=2e-6)
            if number % 2:
                feedback.settle({frame_id(frame): "applied"})


def test_the_residual_stays_bounded():
    """||e||^2 <= 4 (1 - delta) / delta^2 G^2 for a contractive codec and updates of norm at most G."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        feedback = ErrorFeedback(Path(folder) / "e", LAYOUT, "topk(16,2)|fp32|flat;min=0")
        delta, norms = 2 / 16, []
        for number in range(1, 120):
            update = {e.name: rng.standard_normal(e.shape).astype(np.float32) for e in LAYOUT.entries}
            size = np.linalg.norm(flat(update))
            update = {name: (array / size).astype(np.float32) for name, array in update.items()}
            frame = feedback.encode(update, round_index=number)
            feedback.settle({frame_id(frame): "applied"})
            norms.append(feedback.norm())
        assert max(norms) ** 2 <= 4 * (1 - delta) / delta**2
        assert max(norms[60:]) < 1.5 * max(norms[:60])
