"""The planner: exact bytes on the meta device, and the H that keeps a site at work 95 % of the time."""

from __future__ import annotations

import json

from umbel.cli.plan_pretrain import plan_pretrain, pretrain_plan, steps_for, utilisation
from umbel.config import resolve

SETTINGS = ["run.task=pretrain", "train.mode=full", "clients.minimum=2", "compression.up=exact"]


def test_h_is_the_smallest_that_reaches_the_utilisation() -> None:
    # 125 MB at 100 Mbit/s are 10 s; with 5 s fixed and the margin 1.5: 22.5 s, and 19 times that in steps of 2 s.
    assert steps_for(125e6, 100.0, 2.0) == 214
    assert utilisation(214, 125e6, 100.0, 2.0) >= 0.95 > utilisation(213, 125e6, 100.0, 2.0)
    assert steps_for(0, 100.0, 1e6) == 1


def test_row_24_gpt2_medium_on_the_meta_device() -> None:
    """Bytes, chunks and memory of GPT-2 Medium from its shape; the sparse codec fits where dense does not."""
    config = resolve(None, [*SETTINGS, "model.name=config:gpt2-medium"])
    found = pretrain_plan(config, link_mbit=50.0, step_seconds=1.0)
    assert found["parameters"] == 354_823_168
    assert found["full_exchange_bytes"] == 1_419_292_672
    own = found["own"]
    assert 0 < own["bytes_up"] - 1_419_292_672 < 10_000
    assert (own["chunks_up"], own["chunks_down"]) == (271, 271)
    assert found["site_memory_bytes"] == 16 * 354_823_168
    rows = {row["up"]: row for row in found["codecs"]}
    assert rows["topk(4096,64)|sign2|rice"]["bytes_up"] * 170 < own["bytes_up"]
    assert rows["int8(256,rtn)"]["bytes_up"] < 0.27 * own["bytes_up"]
    assert own["local_steps"] > 500
    # A full exchange both ways at 50 Mbit/s takes 454 s.
    assert own["local_steps"] == 13_087
    assert found["advice"]["utilisation"] >= 0.95


def test_the_advice_is_the_least_lossy_that_keeps_h_small(capsys) -> None:
    config = resolve(None, [*SETTINGS, "model.name=config:gpt2-tiny"])
    found = pretrain_plan(config, link_mbit=1000.0, step_seconds=0.5)
    assert found["advice"] == {
        "up": "exact",
        "down": "exact",
        "feedback": 0.0,
        "local_steps": found["codecs"][0]["local_steps"],
        "utilisation": found["codecs"][0]["utilisation"],
    }
    said: list[str] = []
    settings = [*SETTINGS, "model.name=config:gpt2-tiny"]
    options = {"link_mbit": 10.0, "step_seconds": 0.5, "say": said.append}
    assert plan_pretrain(None, settings, as_json=True, **options) == 0
    assert json.loads(said[0])["parameters"] == 133_056
    assert plan_pretrain(None, settings, as_json=False, **options) == 0
    assert "133,056 parameters" in said[1]
    assert "advice: compression.up=" in said[1]
