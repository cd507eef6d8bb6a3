"""Error feedback between engine and site: what a codec dropped, and what the server lost, comes back; nothing twice."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from support.scripted import Script, died, make_bench, silent, wrap_bytes

import compression
from client_app.outgoing import encode_update, residual_file
from compression import Layout
from compression.payload import decode_update
from umbel.messages import CONTROL_RECORD, Instruction, from_record

SPEC = "topk(4096,64)|sign2|rice"


def order(round_index: int, outcomes=(), up: str = SPEC) -> Instruction:
    return Instruction("r", round_index, 1, "b", "a", 60.0, up=up, outcomes=json.dumps(list(outcomes)))


def test_applied_plus_residual_is_the_sum_of_changes(tmp_path) -> None:
    """Rounds applied, dropped and rejected: with decay 1 nothing but the rejected one is lost."""
    rng = np.random.default_rng(1)
    base = {"w": np.zeros((128, 64), np.float32)}
    layout = Layout.from_arrays(base)
    fates = ["applied", "dropped", "applied", "rejected", "applied"]
    applied, wanted, outcomes = np.zeros((128, 64)), np.zeros((128, 64)), []
    for index, fate in enumerate(fates, start=1):
        update = rng.normal(size=(128, 64)).astype(np.float32)
        got = encode_update(
            order(index, outcomes), {"w": update}, layout, base, tmp_path, feedback=1.0, seed=index
        )
        assert got.payload == "delta"
        outcomes.append([index, 1, fate])
        decoded = decode_update(got.frame, layout, SPEC, base)["w"]
        applied += decoded if fate == "applied" else 0
        wanted += update if fate != "rejected" else 0
    from compression.feedback import ErrorFeedback
    from compression.payload import delta_layout

    kept = ErrorFeedback(
        tmp_path / residual_file(delta_layout(layout)),
        delta_layout(layout),
        SPEC,
        key={"run": "r", "site": "a", "segment": "0/0"},
    )
    kept.settle(dict.fromkeys(kept.pending, "applied"))
    total = applied + kept.residual["w"].reshape(128, 64)
    assert np.abs(total - wanted).max() <= 1e-5


def test_the_engine_names_the_fate_of_every_update() -> None:
    """Applied, dropped (silent or dead site, skipped round), rejected: in the next instruction, once each."""
    scripts = [Script("a"), Script("b"), Script("c")]
    scripts[1].faults[1] = died()
    scripts[2].faults[1] = lambda m, r, a: wrap_bytes(m, r, b"junk")
    scripts[2].faults[2] = silent
    bench = make_bench(scripts, "clients.quorum=1")
    for _ in range(3):
        bench.engine.run_round()
    last = {s.name: json.loads(s.seen[-1].outcomes) for s in scripts}
    assert last["a"] == [[1, 1, "applied"], [2, 1, "applied"]]
    assert last["b"] == [[1, 1, "dropped"], [2, 1, "applied"]]
    assert last["c"] == [[1, 1, "rejected"], [2, 1, "dropped"]]


def test_a_skipped_round_drops_what_had_arrived() -> None:
    scripts = [Script("a"), Script("b"), Script("c")]
    for script in scripts[1:]:
        script.faults[1] = died()
    bench = make_bench(scripts, "run.max-consecutive-skips=1")
    with pytest.raises(Exception, match="brought no commit"):
        bench.engine.run_round()
    assert bench.engine.registry.sites["a"].outcomes == [[1, 1, "dropped"]]


def test_lossy_updates_through_the_engine_are_close_to_exact_ones() -> None:
    """An int8 change of a site is decoded against the state that was sent, weighted and added."""

    def lossy(m, r, a):
        from compression.payload import change, delta_layout

        instruction = from_record(Instruction, m.content[CONTROL_RECORD])
        assert instruction.up == "int8(256,rtn)"
        layout = Layout.from_arrays(a)
        base = {n: v - np.float32(1.0) for n, v in a.items()}
        frame = compression.encode(change(a, base, layout), delta_layout(layout), instruction.up)
        return wrap_bytes(m, replace(r, payload="delta"), frame)

    scripts = [Script("a"), Script("b")]
    for script in scripts:
        script.faults[1] = lossy
    bench = make_bench(scripts, "compression.up=int8(256,rtn)")
    bench.engine.run_round()
    assert bench.values == [pytest.approx(1.0, abs=1e-6)] * 3
