"""Privacy through the engine and through whole runs: dropouts, errors, crashes and the end of the budget."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from support.inprocess import commits, make_session
from support.scripted import Script, died, edited, make_bench, refused

from server_app.checker import check_run
from server_app.privacy import Privacy
from server_app.rounds import RunAborted
from umbel.checkpoints import load_newest
from umbel.digest import state_crc
from umbel.privacy.ledger import BudgetExhausted
from umbel.privacy.noise import seeded_normal
from umbel.privacy.rdp import epsilon_after, epsilon_of, gaussian_rdp
from umbel.telemetry.events import read_events

pytestmark = pytest.mark.fault

CLIP, NOISE, SEED = 0.5, 2.0, 7
PRIVATE = (
    f"privacy.clip-norm={CLIP}",
    f"privacy.noise-multiplier={NOISE}",
    "privacy.noise-source=seed",
    "clients.normalise=fixed",
    "clients.weighting=uniform",
    "clients.max-norm-ratio=0",
    f"run.seed={SEED}",
)
# Elements of the scripted state: `b` has 3, `w` has 4.
SIZE = 7


def trio() -> list[Script]:
    return [Script("a", 1.0, tokens=10), Script("b", -2.0, tokens=30), Script("c", 4.0, tokens=60)]


def clipped_step(change: float) -> float:
    """What a site that adds `change` to each of the 7 elements adds after clipping to CLIP."""
    return change * min(1.0, CLIP / (abs(change) * math.sqrt(SIZE)))


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        (None, (1.0, -2.0, 4.0)),
        (died(), (-2.0, 4.0)),
        (refused("oom"), (-2.0, 4.0)),
        (edited(weight=-1.0), (-2.0, 4.0)),
    ],
)
def test_f40_dropouts_and_errors_change_the_sum_and_neither_denominator_nor_noise(fault, left) -> None:
    """F40: n stays the three that were asked; the noise is z C / n whoever answered."""
    scripts = trio()
    if fault is not None:
        scripts[0].faults[1] = fault
    bench = make_bench(scripts, *PRIVATE)
    record = bench.engine.run_round()
    normal = seeded_normal(SEED, 1, 1)
    noise = {"b": normal(3), "w": normal(4).reshape(2, 2)}
    total = sum(clipped_step(c) for c in left)
    for name, start in (("b", np.zeros(3)), ("w", np.arange(4.0).reshape(2, 2))):
        want = start + (total + NOISE * CLIP * noise[name]) / 3
        assert bench.engine.state[name] == pytest.approx(want, abs=1e-6)
    assert record["privacy"]["denominator"] == 3
    assert record["privacy"]["noise_deviation"] == NOISE * CLIP / 3
    # The scripted sites do not clip: the server does, for each that came.
    assert record["privacy"]["clipped_by_server"] == len(left)


def test_f40_the_noise_measured_over_many_rounds_is_z_c_over_n() -> None:
    """F40: 80 rounds of zero updates: the state's steps are the noise alone."""
    bench = make_bench([Script(n, 0.0) for n in "abcd"], *PRIVATE)
    steps = []
    for _ in range(80):
        before = {k: v.astype(np.float64) for k, v in bench.engine.state.items()}
        bench.engine.run_round()
        steps += [(bench.engine.state[k] - before[k]).reshape(-1) for k in before]
    found = np.concatenate(steps)
    assert found.size == 80 * SIZE
    assert found.std() == pytest.approx(NOISE * CLIP / 4, rel=0.07)
    assert abs(found.mean()) < 4 * NOISE * CLIP / 4 / math.sqrt(found.size)


def test_f40_epsilon_of_a_run_is_the_reference_and_every_round_states_it() -> None:
    bench = make_bench(trio(), *PRIVATE)
    records = [bench.engine.run_round() for _ in range(5)]
    want = [epsilon_after([(1.0, NOISE)] * k, 1e-5) for k in range(1, 6)]
    assert [r["privacy"]["epsilon"] for r in records] == want
    assert [e["epsilon"] for e in bench.of("privacy_release")] == want
    # Computed a second way: one release of RDP a / (2 z^2), five times.
    orders = [1 + x / 1000 for x in range(1, 40_000)]
    finest = epsilon_of([5 * gaussian_rdp(NOISE, a) for a in orders], orders, 1e-5)
    assert want[4] == pytest.approx(finest, rel=1e-3)


def test_f40_the_ledger_is_written_before_noise_is_drawn(monkeypatch) -> None:
    """F40: were the process killed between the two, the release would be counted and never seen."""
    seen = []
    bench = make_bench(trio(), *PRIVATE)

    def drawn(*args):
        seen.append([e["event"] for e in bench.events][-1])
        return lambda num: np.zeros(num)

    monkeypatch.setattr("server_app.privacy.seeded_normal", drawn)
    bench.engine.run_round()
    assert seen == ["privacy_release"]


def test_f40_a_ledger_that_cannot_be_written_forbids_the_release() -> None:
    bench = make_bench(trio(), *PRIVATE)
    before = state_crc(bench.engine.state)

    def refuse(event, /, *, fsync=False, **fields):
        if event == "privacy_release":
            assert fsync
            raise OSError(28, "no space")

    bench.engine.privacy._event = refuse
    with pytest.raises(OSError, match="no space"):
        bench.engine.run_round()
    assert state_crc(bench.engine.state) == before
    assert bench.engine.privacy.ledger.releases == []


def test_f40_a_skipped_round_has_released_nothing_and_costs_nothing() -> None:
    scripts = trio()
    for script in scripts[:2]:
        script.faults[1] = died()
    bench = make_bench(scripts, *PRIVATE, "run.max-consecutive-skips=1")
    with pytest.raises(RunAborted):
        bench.engine.run_round()
    assert bench.of("privacy_release") == []
    assert bench.engine.privacy.ledger.epsilon == 0.0


def test_f41_zero_updates_a_nan_and_another_number_of_sites_raise_nothing() -> None:
    """F41: nothing but zero, a site that sends no finite number, one more site than the goal, one less."""
    scripts = [Script("a", 0.0), Script("b", 0.0), Script("c", 0.0), Script("d", 0.0)]
    # An honest encoder would refuse NaN; this one sends a frame without a value the server could use.
    scripts[2].faults[1] = edited(loss=math.nan)
    bench = make_bench(scripts, *PRIVATE, "clients.quorum=1")
    record = bench.engine.run_round()
    assert {r["site"] for r in record["rejected"]} == {"c"}
    assert all(np.isfinite(a).all() for a in bench.engine.state.values())
    bench.grid.sites[1].online = False
    assert bench.engine.run_round()["privacy"]["denominator"] == 3
    bench.grid.sites[1].online = True
    assert bench.engine.run_round()["privacy"]["denominator"] == 4
    assert all(np.isfinite(a).all() for a in bench.engine.state.values())


def test_f42_the_budget_ends_the_run_before_a_site_is_asked() -> None:
    budget = epsilon_after([(1.0, NOISE)] * 2, 1e-5)
    bench = make_bench(trio(), *PRIVATE, f"privacy.budget-epsilon={budget!r}")
    bench.engine.run_round()
    bench.engine.run_round()
    before, sent = state_crc(bench.engine.state), len(bench.grid.sent)
    with pytest.raises(BudgetExhausted, match="Nothing of this round was released"):
        bench.engine.run_round()
    assert (state_crc(bench.engine.state), len(bench.grid.sent)) == (before, sent)
    assert len(bench.of("privacy_release")) == 2
    assert len(bench.of("round_opened")) == 2


def test_noise_of_the_system_is_the_default_and_differs_between_runs() -> None:
    settings = [s for s in PRIVATE if not s.startswith("privacy.noise-source")]
    found = set()
    for _ in range(2):
        bench = make_bench(trio(), *settings)
        bench.engine.run_round()
        found.add(state_crc(bench.engine.state))
    assert len(found) == 2


def test_two_noisy_runs_from_one_seed_are_equal_bit_for_bit() -> None:
    found = set()
    for delays in ({}, {"a": 7.0, "c": 3.0}):
        bench = make_bench(trio(), *PRIVATE, delays=delays)
        bench.engine.run_round()
        found.add(state_crc(bench.engine.state))
    assert len(found) == 1


# Whole runs with the project's own sites.

RUN = (*PRIVATE, "run.method=ffa", "train.local-steps=1", "train.batch-size=2", "data.limit=8")


def releases(folder: Path) -> list[dict]:
    return [e for e in read_events(folder / "run/events.jsonl") if e["event"] == "privacy_release"]


def fresh(folder: Path) -> list[dict]:
    return [e for e in releases(folder) if not e.get("carried")]


def stop_at(point: str, round_index: int):
    def fault(at: str, index: int) -> None:
        if (at, index) == (point, round_index):
            raise KeyboardInterrupt

    return fault


def test_sites_clip_before_they_encode(tmp_path) -> None:
    """With an exact codec nothing is left for the server to clip, in the space each method exchanges."""
    for method in ("ffa", "rolora", "fedit"):
        folder = tmp_path / method
        settings = (
            *RUN,
            f"run.method={method}",
            "privacy.clip-norm=0.001",
            "run.rounds=2",
            "eval.final=false",
        )
        assert make_session(folder, *settings).run() == 0
        for record in commits(folder):
            assert record["privacy"]["clipped_by_server"] == 0
            assert len(record["accepted"]) == 3
        assert check_run(folder / "run") == []
    norms = [a["norm"] for r in commits(tmp_path / "ffa") for a in r["accepted"]]
    assert max(norms) > 0


def test_f40_crashes_only_ever_raise_the_count(tmp_path) -> None:
    """F40: killed after the noise and before the checkpoint, twice, with the newest checkpoint damaged in between."""
    for crash in (("after_commit", 2), ("in_checkpoint", 2), ("after_commit", 3)):
        session = make_session(
            tmp_path, *RUN, "run.rounds=3", "run.resume=auto", "eval.final=false", fault=stop_at(*crash)
        )
        with pytest.raises(KeyboardInterrupt):
            session.run()
    newest = max((tmp_path / "run/checkpoints").glob("round-[0-9]*"))
    (newest / "state.safetensors").write_bytes(b"")
    last = make_session(tmp_path, *RUN, "run.rounds=3", "run.resume=auto", "eval.final=false")
    assert last.run() == 0
    # Round 2 four times (twice lost before its checkpoint, once with it); (3, 1) was opened and released nothing.
    assert [(e["round"], e["attempt"]) for e in fresh(tmp_path)] == [
        (1, 1), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4), (3, 3),
    ]  # fmt: skip
    assert [r["round"] for r in commits(tmp_path)] == [1, 2, 3]
    epsilons = [e["epsilon"] for e in releases(tmp_path)]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == epsilon_after([(1.0, NOISE)] * 7, 1e-5)
    assert len(load_newest(tmp_path / "run/checkpoints").meta["privacy"]) == 7
    assert check_run(tmp_path / "run") == []
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["privacy_epsilon"] == epsilons[-1]


def test_f42_a_spent_budget_ends_the_run_with_its_own_code_and_a_good_checkpoint(tmp_path) -> None:
    """F42: no release beyond the budget, the last state exported, and a resume stops at once unless the budget grows."""
    budget = epsilon_after([(1.0, NOISE)] * 2, 1e-5)
    settings = (*RUN, "run.rounds=4", "telemetry.report=true", f"privacy.budget-epsilon={budget!r}")
    assert make_session(tmp_path, *settings).run() == 77
    end = read_events(tmp_path / "run/events.jsonl")[-1]
    assert (end["event"], end["outcome"], end["exit_code"]) == ("run_finished", "stopped", 77)
    assert "the privacy budget is spent" in end["reason"]
    assert load_newest(tmp_path / "run/checkpoints").round == 2
    assert list((tmp_path / "run").rglob("adapter_model.safetensors"))
    page = (tmp_path / "run/report.html").read_text()
    assert "Privacy, epsilon" in page and f"{budget:.3g}" in page

    assert make_session(tmp_path, *settings, "run.resume=auto").run() == 77
    assert len(fresh(tmp_path)) == 2
    larger = (*settings[:-1], "privacy.budget-epsilon=1e6", "run.resume=auto")
    assert make_session(tmp_path, *larger).run() == 0
    assert [r["round"] for r in commits(tmp_path)] == [1, 2, 3, 4]
    assert len(fresh(tmp_path)) == 4


def test_f40_releases_of_a_run_that_died_without_a_checkpoint_are_carried_on(tmp_path) -> None:
    """Its states may have been served although the disk refused every checkpoint."""
    from server_app import checkpoint

    def full(path, data):
        raise OSError(28, "no space")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_durable", full)
        session = make_session(
            tmp_path, *RUN, "run.rounds=3", "eval.final=false", fault=stop_at("dispatch", 3)
        )
        with pytest.raises(KeyboardInterrupt):
            session.run()
    assert len(fresh(tmp_path)) == 2
    again = make_session(tmp_path, *RUN, "run.rounds=1", "run.resume=auto", "eval.final=false")
    assert again.run() == 0
    assert [bool(e.get("carried")) for e in releases(tmp_path)] == [True, True, False]
    assert releases(tmp_path)[-1]["epsilon"] == epsilon_after([(1.0, NOISE)] * 3, 1e-5)


def test_f40_a_changed_clip_or_noise_is_no_resume_of_the_same_run(tmp_path) -> None:
    assert make_session(tmp_path, *RUN, "run.rounds=1", "eval.final=false").run() == 0
    changed = make_session(tmp_path, *RUN, "run.rounds=2", "run.resume=auto", "privacy.noise-multiplier=0.1")
    assert changed.run() == 78
    assert "privacy.noise-multiplier: 2.0 -> 0.1" in changed.history.reason


def test_i5_a_release_without_its_ledger_row_is_found(tmp_path) -> None:
    assert make_session(tmp_path, *RUN, "run.rounds=2", "eval.final=false").run() == 0
    path = tmp_path / "run/events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if "privacy_release" in line and '"round": 2' in line)
    path.write_text("".join(lines[:at] + lines[at + 1 :]))
    assert [p[:2] for p in check_run(tmp_path / "run")] == ["I5"]
    lower = json.loads(lines[at])
    lower["epsilon"] = 0.1
    path.write_text("".join([*lines[:at], json.dumps(lower) + "\n", *lines[at + 1 :]]))
    assert [p[:2] for p in check_run(tmp_path / "run")] == ["I5"]


def test_an_unset_privacy_changes_nothing() -> None:
    bench = make_bench(trio())
    record = bench.engine.run_round()
    assert bench.engine.privacy is None
    assert "privacy" not in record
    assert isinstance(make_bench(trio(), *PRIVATE).engine.privacy, Privacy)
