"""`umbel compare` with disturbed runs: the three protocols and the picture from real runs in one process."""

from __future__ import annotations

import json

from support.inprocess import SETTINGS as BASE
from support.inprocess import counted_runner
from support.rules import SETTINGS

from umbel.cli.compare import compare, configurations

OVERRIDES = (*BASE, *SETTINGS, "run.rounds=2", "eval.every=1", "data.limit=24")


def test_protocols_are_read_from_the_runs(tmp_path) -> None:
    """Bytes add up to the ledger's, the target of the worst method is reached by both, the disturbance is paired."""
    disturb = ["train.learning-rate=0"]
    planned = configurations(None, OVERRIDES, ["fedit", "ffa"], 1, tmp_path / "out", disturb)
    assert [m for m, _, _ in planned] == ["fedit", "fedit disturbed", "ffa", "ffa disturbed"]
    run, started = counted_runner(tmp_path)
    said: list[str] = []
    assert compare(planned, run, tmp_path / "out", say=said.append, disturb=disturb) == 0
    assert started == ["fedit-7", "fedit-7-disturbed", "ffa-7", "ffa-7-disturbed"]
    rows = {r["method"]: r for r in json.loads((tmp_path / "out" / "comparison.json").read_text())}
    for row in rows.values():
        assert [p["round"] for p in row["curve"]] == [0, 1, 2]
        assert row["curve"][-1]["bytes"] == row["bytes_up"] + row["bytes_down"]
        assert row["curve"][-1]["tokens"] == row["tokens"] > 0
    read = json.loads((tmp_path / "out" / "protocols.json").read_text())
    quality, cost = read["quality_under_budget"], read["cost_to_target"]
    assert quality["budget_bytes"] == rows["ffa"]["curve"][-1]["bytes"]
    # fedit moves more than twice as much: a whole round of it is still within what two of ffa cost, or none is.
    within = [p["loss"] for p in rows["fedit"]["curve"][1:] if p["bytes"] <= quality["budget_bytes"]]
    assert quality["methods"]["fedit"]["loss"] == (within[-1] if within else None)
    assert cost["target_loss"] == max(rows[m]["curve"][-1]["loss"] for m in ("fedit", "ffa"))
    assert {v["reached"] for v in cost["methods"].values()} == {1}
    # Without a learning rate nothing is learned: the increase is what training had gained.
    for method in ("fedit", "ffa"):
        gained = rows[method]["curve"][0]["loss"] - rows[method]["curve"][-1]["loss"]
        found = read["robustness"]["methods"][method]
        assert found["pairs"] == 1
        assert abs(found["increase"] - gained) < 1e-6
        assert gained > 0
    assert (tmp_path / "out" / "comparison.svg").read_text().startswith("<svg")
    assert any("Quality under a budget" in text for text in said)
