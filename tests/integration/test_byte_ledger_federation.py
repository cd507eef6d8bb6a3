"""The ledger of bytes against Flower's own counters, and cells of the matrix method x codec as real processes."""

from __future__ import annotations

import json

import pytest
from support.cells import CODECS
from support.cells import SETTINGS as CELL_SETTINGS
from support.federation import Federation

from server_app.byte_plan import byte_plan
from umbel.config import resolve

SITES = {"clinic": "demo:clinic", "kitchen": "demo:kitchen"}
COMMON = (
    "run.seed=7",
    "train.learning-rate=0.01",
    "train.threads=1",
    "eval.every=0",
    "telemetry.report=true",
)
# A bigger adapter, so that frames and not envelopes are what is counted; several rounds and a final evaluation.
LEDGER = (
    "run.rounds=2",
    "clients.minimum=2",
    "lora.rank=16",
    "train.local-steps=1",
    "data.limit=8",
    "data.max-length=96",
    "eval.final=true",
)
CELLS = (
    ("carry", "int8"),
    pytest.param("ravan", "ecsq", marks=pytest.mark.nightly),
    pytest.param("ffa", "sparse", marks=pytest.mark.nightly),
)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with Federation(tmp_path_factory.mktemp("ledger"), SITES) as running:
        yield running


def run(federation: Federation, name: str, *overrides: str) -> tuple[dict, dict]:
    """Run once and return (summary, Flower's record of the run)."""
    folder = federation.folder / name
    run_id = federation.start(*COMMON, *overrides, f"run.output-dir={folder}")
    status = federation.wait(run_id, seconds=240)
    assert status == "finished:completed", (folder / "server.log").read_text()[-3000:]
    return json.loads((folder / "summary.json").read_text()), federation.facts(run_id)


@pytest.mark.federation
@pytest.mark.timeout(420)
def test_the_ledger_agrees_with_flowers_counters_to_one_per_cent(federation) -> None:
    """Per site, phase and direction; the sum over all is what SuperLink counted of this run."""
    summary, facts = run(federation, "ledger", *LEDGER)
    wire = facts["network-traffic"]
    assert summary["wire_bytes_up"] == pytest.approx(wire["inbound-bytes"], rel=0.01)
    assert summary["wire_bytes_down"] == pytest.approx(wire["outbound-bytes"], rel=0.01)
    traffic = summary["traffic"]
    assert set(traffic) == set(SITES)
    for site in SITES:
        assert set(traffic[site]) >= {"join", "train", "evaluate"}
        # Two frames of training in each direction and one more down; the envelopes come on top.
        frame = summary["bytes_up"] / 4
        assert frame < traffic[site]["train"]["up"] / 2 < 1.1 * frame
        assert frame < traffic[site]["evaluate"]["down"] < 1.1 * frame
        assert traffic[site]["evaluate"]["up"] < 0.1 * frame
    total = sum(size for phases in traffic.values() for way in phases.values() for size in way.values())
    assert total == summary["wire_bytes_up"] + summary["wire_bytes_down"]
    assert "Bytes on the wire" in (federation.folder / "ledger" / "report.html").read_text()


@pytest.mark.federation
@pytest.mark.timeout(420)
@pytest.mark.parametrize(("method", "codec"), CELLS)
def test_cells_of_the_matrix_as_real_processes(federation, method: str, codec: str) -> None:
    """Bytes as planned (exactly, where the codec's rate is fixed) and as Flower counted them."""
    overrides = [*CELL_SETTINGS, "data.max-length=64", f"run.method={method}", *CODECS[codec].settings]
    summary, _ = run(federation, f"{method}-{codec}", *overrides)
    planned = byte_plan(resolve(None, [*COMMON, *overrides]), sorted(SITES))
    assert summary["bytes_down"] == planned["total_down_bytes"]
    assert summary["bytes_up"] == pytest.approx(
        planned["total_up_bytes"], rel=0 if planned["exact_bytes"] else 0.15
    )
