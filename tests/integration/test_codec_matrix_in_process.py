"""Every method x every class of codec for one round: names, bytes as planned, and refusals in words.

The real server and the real sites, in one process; `test_byte_ledger_federation.py` runs some of the cells as real
processes, `test_codec_matrix_simulation.py` one as a Flower simulation and `benchmarks/codec_matrix.py` all of them.
"""

from __future__ import annotations

import pytest
from support.cells import CODECS, SITES, run_cell

import compression.registry
from compression.policy import parse_policy
from compression.registry import build
from server_app.byte_plan import BytePlan
from umbel.config.schema import METHODS

GOOD = {name: codec for name, codec in CODECS.items() if not codec.refused}
BAD = {name: codec for name, codec in CODECS.items() if codec.refused}
# Every class of codec with these two; every other method with one of each kind of frame.
WHOLE = ("fedit", "carry")
KINDS = ("exact", "lossless", "by-role", "int4", "sign", "sparse", "ecsq", "lowrank")


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
        assert cell.code == 0, where
        assert cell.sent == cell.named, where
        check_bytes(cell, where)


def check_bytes(cell, where: str) -> None:
    """Predicted = on the wire = counted; estimates of codecs without a fixed rate hold to 10 %."""
    plan = BytePlan(cell.session.config, SITES)
    planned = plan.rounds()[0]
    assert planned["down"] == cell.down, where
    for site in SITES:
        if plan.exact:
            assert planned["up"][site] == cell.up[site], where
        else:
            assert planned["up"][site] == pytest.approx(cell.up[site], rel=0.1), where
    (record,) = cell.session.history.committed
    assert (record.bytes_up, record.bytes_down) == (sum(cell.up.values()), sum(cell.down.values())), where
    for site, phases in cell.session.history.traffic().items():
        for direction, frames in (("up", cell.up), ("down", cell.down)):
            assert 0 < phases["train"][direction] - frames[site] < 6000, (where, direction)


@pytest.mark.parametrize("name", BAD)
def test_a_cell_that_makes_no_sense_is_refused_in_words(tmp_path, name: str) -> None:
    """Before any site is asked, whatever the method; the reason names the setting."""
    for method in ("fedavg", "carry", "ravan"):
        cell = run_cell(tmp_path / method, method, BAD[name])
        assert cell.code == 78, cell.reason
        assert not cell.down
        assert "compression" in cell.reason
        assert BAD[name].refused in cell.reason
