"""The site's parts without a model: schedule, clock, durable state, identity, refusals."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from client_app.clock import Clock
from client_app.identity import assign, identify
from client_app.replies import as_refusal
from client_app.schedule import learning_rate
from client_app.state import SiteState, prune_runs, safe_name
from client_app.train_round import with_smaller_batches
from umbel.config import resolve
from umbel.errors import Refusal, RefusalKind

COSINE = {"peak": 1.0, "total_steps": 50, "warmup_steps": 5, "kind": "cosine", "min_lr_fraction": 0.0}


def test_h33_the_schedule_runs_over_global_steps() -> None:
    """H33: 10 rounds x 5 steps, 5 warm-up steps; a site sampled in rounds 1, 4 and 9 is at the run's position."""
    whole = [learning_rate(g, **COSINE) for g in range(50)]
    assert whole[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    for r in (1, 4, 9):
        assert [learning_rate((r - 1) * 5 + s, **COSINE) for s in range(5)] == whole[(r - 1) * 5 : r * 5]
    assert whole[5] == 1.0
    assert whole[27] == pytest.approx(0.5 * (1 + math.cos(math.pi * 22 / 45)))
    assert sum(a < b for a, b in itertools.pairwise(whole)) == 4


def test_schedule_kinds_and_floor() -> None:
    base = {**COSINE, "warmup_steps": 0, "min_lr_fraction": 0.1}
    assert learning_rate(50, **base) == pytest.approx(0.1)
    assert learning_rate(500, **base) == pytest.approx(0.1)
    assert learning_rate(25, **{**base, "kind": "linear"}) == pytest.approx(0.55)
    assert learning_rate(49, **{**base, "kind": "constant"}) == 1.0


def test_clock_stops_a_margin_early() -> None:
    now = [100.0]
    clock = Clock(50.0, now=lambda: now[0])
    assert clock.left_seconds == 45.0
    now[0] = 144.9
    assert not clock.expired
    now[0] = 145.0
    assert clock.expired
    assert Clock(10_000.0, now=lambda: 0.0).margin_seconds == 30.0


def stage(state: SiteState, r: int, a: int = 1) -> None:
    state.stage(r, a, {"cursor": {"epoch": 0, "position": r}}, {"m": np.full(3, r, np.float32)})


def test_state_is_what_the_server_names(tmp_path) -> None:
    """Two phases: a staged version counts only when the server says that the update did."""
    state = SiteState(tmp_path, "run", "st-mary")
    assert state.select((0, 0)) == (({}, {}), True)
    stage(state, 1)
    stage(state, 2)
    snapshot, found = state.select((1, 1))
    assert found
    assert snapshot.meta["cursor"]["position"] == 1
    assert snapshot.arrays["m"].tolist() == [1, 1, 1]


def test_a_lost_or_damaged_version_is_said_not_guessed(tmp_path) -> None:
    state = SiteState(tmp_path, "run", "s")
    stage(state, 1)
    assert state.select((7, 1)) == (({}, {}), False)
    next(tmp_path.rglob("tensors.safetensors")).write_bytes(b"x")
    assert state.select((1, 1)) == (({}, {}), False)


def test_old_versions_go_the_settled_one_stays(tmp_path) -> None:
    state = SiteState(tmp_path, "run", "s")
    for r in range(1, 9):
        stage(state, r)
    state.prune((2, 1))
    assert sorted(p.name for p in state.folder.glob("v-*")) == [f"v-{r:06d}-0001" for r in (2, 5, 6, 7, 8)]


def test_a_second_worker_on_one_state_is_refused(tmp_path) -> None:
    state = SiteState(tmp_path, "run", "s")
    with state.exclusive(), pytest.raises(Refusal, match="another instruction"), state.exclusive():
        pass
    with state.exclusive():
        pass


@pytest.mark.fault
def test_f18_kill_9_while_staging_leaves_no_torn_version(tmp_path) -> None:
    """A process killed at any write leaves either the whole version or none."""
    code = """
import os, sys, numpy as np
from pathlib import Path
import client_app.state as s
count = int(sys.argv[2])
def dying(path, data, seen=[0]):
    seen[0] += 1
    Path(path).write_bytes(data[: len(data) // 2])
    if seen[0] == count:
        os.kill(os.getpid(), 9)
    Path(path).write_bytes(data)
s.write_durable = dying
st = s.SiteState(Path(sys.argv[1]), "run", "s")
st.stage(5, 1, {"cursor": {"epoch": 0, "position": 5}}, {"m": np.ones(4, np.float32)})
"""
    for count in (1, 2):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), str(count)], check=False, cwd=os.getcwd()
        )
        assert done.returncode == -9
        state = SiteState(tmp_path, "run", "s")
        assert state.select((5, 1)) == (({}, {}), False)
        stage(state, 5)
        assert state.select((5, 1))[1]
        state.prune((5, 1))
        assert [p.name for p in state.folder.iterdir() if p.name.startswith(".")] == []
        import shutil

        shutil.rmtree(tmp_path / "run")


def test_names_cannot_leave_the_folder(tmp_path) -> None:
    assert safe_name("../../etc/passwd") == "_.._etc_passwd"
    assert safe_name("..") == "_"
    assert SiteState(tmp_path, "../x", "../../y").folder.resolve().is_relative_to(tmp_path)


def test_state_of_forgotten_runs_is_removed(tmp_path) -> None:
    stage(SiteState(tmp_path, "old", "s"), 1)
    prune_runs(tmp_path, now=os.path.getmtime(tmp_path / "old") + 10 * 86_400)
    assert (tmp_path / "old").exists()
    prune_runs(tmp_path, now=os.path.getmtime(tmp_path / "old") + 40 * 86_400)
    assert not (tmp_path / "old").exists()


CONFIG = resolve(None, [])


def test_a_real_site_uses_its_own_data_and_name(tmp_path) -> None:
    got = identify({"name": "st-mary", "data": "/data/x.jsonl", "state-dir": str(tmp_path)}, 7, CONFIG)
    assert (got.name, got.source, got.share, got.state_dir) == ("st-mary", "/data/x.jsonl", (0, 1), tmp_path)


def test_a_path_of_the_run_is_never_opened_at_a_real_site() -> None:
    config = resolve(None, ["data.source=/etc/passwd"])
    with pytest.raises(Refusal, match="never opened"):
        identify({"name": "st-mary"}, 7, config)


def test_a_site_without_data_says_what_to_do() -> None:
    with pytest.raises(Refusal, match="node-config") as caught:
        identify({"name": "st-mary"}, 7, CONFIG)
    assert caught.value.kind is RefusalKind.NO_DATA


def test_simulated_sites_share_files_and_rows(tmp_path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n')
    names = [assign(str(tmp_path), "auto", i, 3)[0] for i in range(3)]
    assert names == ["a", "b", "c"]
    five = [assign(str(tmp_path), "auto", i, 5) for i in range(5)]
    assert [(n, share) for n, _, share, _ in five] == [
        ("a-001", (0, 2)),
        ("b-001", (0, 2)),
        ("c", (0, 1)),
        ("a-002", (1, 2)),
        ("b-002", (1, 2)),
    ]
    single = assign(str(tmp_path / "a.jsonl"), "dirichlet", 2, 4)
    assert single == ("site-003", str(tmp_path / "a.jsonl"), (2, 4), "dirichlet")


def test_no_row_of_data_leaves_in_a_refusal() -> None:
    secret = "patient 4711 has"
    try:
        raise ValueError(f"cannot parse {secret}")
    except ValueError as error:
        refusal = as_refusal(error)
    assert refusal.kind is RefusalKind.EXCEPTION
    assert secret not in refusal.reason
    assert "ValueError at test_site_parts.py:" in refusal.reason


def test_out_of_memory_halves_the_sequences_once() -> None:
    tried, restored = [], []

    def work(max_tokens: int) -> int:
        tried.append(max_tokens)
        if len(tried) == 1:
            raise MemoryError
        return max_tokens

    assert with_smaller_batches(work, restore=lambda: restored.append(1), max_tokens=1000) == 500
    assert (tried, restored) == ([1000, 500], [1])
    assert as_refusal(MemoryError()).kind is RefusalKind.OOM
    with pytest.raises(MemoryError):
        with_smaller_batches(
            lambda n: (_ for _ in ()).throw(MemoryError()), restore=lambda: None, max_tokens=1000
        )
