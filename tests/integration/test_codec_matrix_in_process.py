"""Every method x every class of codec for one round: names, bytes as planned, and refusals in words.

The real server and the real sites, in one process; `test_byte_ledger_federation.py` runs some of the cells as real
processes, `test_codec_matrix_simulation.py` one as a Flower simulation and `benchmarks/codec_matrix.py` all of them.
"""

from __future__ import annotations

import json

import pytest
from support.cells import CODECS, SITES, refusal, run_cell

import compression.registry
from compression.policy import parse_policy
from compression.registry import build
from server_app.byte_plan import BytePlan
from umbel.config.schema import METHODS

GOOD = {name: codec for name, codec in CODECS.items() if not codec.refused}
BAD = {name: codec for name, codec in CODECS.items() if codec.refused}
# Every class of codec with these two; every other method with one of each kind of frame.
WHOLE = ("fedit", "carry")
KINDS = ("exact", "lossless", "by-role", "sparse", "ecsq")


def test_every_class_of_codec_is_in_the_matrix() -> None:
    """A codec that is added must be added here."""
    known = {name for name in vars(compression.registry) if name.endswith("Codec")}
    used = set()
    for name, codec in CODECS.items():
        if name != "rice-alone":
            used |= {type(build(p)).__name__ for _, p in parse_policy(codec.policy).rules}
    assert used == known


@pytest.mark.parametrize("method", METHODS)
def test_a_round_of_every_method_with_every_codec(tmp_path, method: str) -> None:
    """Decoded names are those of the model or of the method's form; bytes are the planned and the counted ones."""
    for name in GOOD if method in WHOLE else KINDS:
        cell = run_cell(tmp_path / name, method, GOOD[name])
        where = f"{method} x {name}: {cell.reason}"
        if word := refusal(method, GOOD[name]):
            check_refusal(cell, word)
            continue
        assert cell.code == 0, where
        assert cell.sent == cell.named, where
        if cell.session.config.clients.mode == "sync":
            check_bytes(cell, where)


def check_bytes(cell, where: str) -> None:
    """Predicted = on the wire = counted; of a codec without fixed rate a tiny frame holds to 15 %."""
    plan = BytePlan(cell.session.config, SITES)
    planned = plan.rounds()[0]
    assert planned["down"] == cell.down, where
    for site in SITES:
        if plan.exact:
            assert planned["up"][site] == cell.up[site], where
        else:
            assert planned["up"][site] == pytest.approx(cell.up[site], rel=0.15), where
    record = cell.session.history.committed[0]
    assert (record.bytes_up, record.bytes_down) == (sum(cell.up.values()), sum(cell.down.values())), where
    for site, phases in cell.session.history.traffic().items():
        for direction, frames in (("up", cell.up), ("down", cell.down)):
            envelopes = phases["train"][direction] - frames[site]
            assert 0 < envelopes < 6000 or cell.session.config.run.rounds > 1, (where, direction)


@pytest.mark.parametrize("name", BAD)
def test_a_cell_that_makes_no_sense_is_refused_in_words(tmp_path, name: str) -> None:
    """Before any site is asked, whatever the method; the reason names the setting."""
    for method in ("fedavg", "carry", "ravan"):
        check_refusal(run_cell(tmp_path / method, method, BAD[name]), BAD[name].refused)


def check_refusal(cell, word: str) -> None:
    assert cell.code == 78, cell.reason
    assert not cell.down
    assert "compression" in cell.reason
    assert word in cell.reason


def test_umbel_plan_tells_the_frames_of_the_configured_codec() -> None:
    """The command asks a process of its own and prints what the in-process plan says; a bad codec ends in words."""
    from support.cells import SETTINGS

    from umbel.cli.plan import plan
    from umbel.config import resolve
    from umbel.errors import UmbelError

    overrides = [*SETTINGS, "run.method=carry", *GOOD["int4"].settings]
    said: list[str] = []
    assert plan(None, overrides, "", as_json=True, say=said.append) == 0
    (printed,) = (json.loads(text) for text in said)
    config = resolve(None, overrides)
    assert printed["rounds"] == BytePlan(config, [f"site-{i + 1:03d}" for i in range(2)]).rounds()
    assert printed["exact_bytes"] is True
    with pytest.raises(UmbelError, match="compression"):
        plan(None, [*overrides, "compression.up=int8(64,rtn)|rice"], "", as_json=True, say=said.append)
