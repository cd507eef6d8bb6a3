from __future__ import annotations

import csv

from umbel.telemetry.history import History
from umbel.telemetry.metrics import write_metrics


def test_metrics_are_long_form_and_read_back(two_site_run, tmp_path):
    path = write_metrics(History.from_events(two_site_run), tmp_path / "metrics.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["round", "split", "metric", "value"]
    found = {(int(r["round"]), r["split"], r["metric"]): float(r["value"]) for r in rows}
    assert len(found) == len(rows)
    assert found[0, "heldout", "loss"] == 4.0
    assert found[0, "heldout", "token_accuracy"] == 0.25
    assert found[0, "heldout:south", "loss"] == 5.0
    assert found[1, "train", "loss"] == 4.5
    assert found[1, "train", "tokens"] == 400
    assert found[3, "server", "loss"] == 2.2
    assert found[3, "round", "sites_dropped"] == 1
    assert found[3, "round", "seconds_wait"] == 6.0
    assert found[3, "round", "exactness_relative_error"] == 5e-8
    assert not any(key[0] == 2 and key[1] in ("train", "round") for key in found)


def test_values_keep_every_bit(tmp_path):
    exact = 0.1 + 0.2
    history = History.from_events([{"event": "evaluated", "round": 0, "where": "sites", "loss": exact}])
    text = write_metrics(history, tmp_path / "m.csv").read_text()
    assert text == "round,split,metric,value\n0,heldout,loss,0.30000000000000004\n"
    assert float(text.rsplit(",", 1)[1]) == exact
