"""The same seed and sites, once simulated and once as real processes: the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.federation import Federation

SETTINGS = [
    "run.rounds=2",
    "run.seed=7",
    "clients.minimum=2",
    "train.local-steps=3",
    "train.learning-rate=0.01",
    "train.threads=1",
    "data.max-length=192",
]


def umbel(*arguments: str, cwd: Path, seconds: float = 240) -> subprocess.CompletedProcess:
    """Run the command line as a user would."""
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "UMBEL_STATE": str(cwd / "state"),
        "UMBEL_RUNS": str(cwd / "runs"),
    }
    command = [sys.executable, "-m", "umbel.cli.main", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )


def overrides(values: list[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Path:
    """The run folder of a simulation of two sites."""
    folder = tmp_path_factory.mktemp("simulated")
    recipe = folder / "r.toml"
    recipe.write_text('[run]\nname = "r"\n[simulation]\nsites = 2\n')
    done = umbel("run", str(recipe), *overrides([*SETTINGS, f"run.output-dir={folder / 'run'}"]), cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run"


def test_a_simulation_leaves_all_that_it_promises(simulated) -> None:
    for name in (
        "config.toml",
        "environment.json",
        "events.jsonl",
        "metrics.csv",
        "report.html",
        "summary.json",
    ):
        assert (simulated / name).stat().st_size > 0, name
    summary = json.loads((simulated / "summary.json").read_text())
    assert (summary["rounds"], summary["sites"], summary["outcome"]) == (2, 2, "completed")
    assert summary["final_eval_loss"] < summary["initial_eval_loss"]
    # Two rounds and two sites: an exact frame each way holds at least the raw tensors.
    assert summary["bytes_up"] >= 4 * 16384 * 4
    assert len(list((simulated / "checkpoints").glob("round-*"))) == 2
    report = (simulated / "report.html").read_text()
    assert "http://" not in report.replace("http://www.w3.org", "")
    assert "https://" not in report


@pytest.mark.federation
@pytest.mark.timeout(420)
def test_simulation_equals_a_federation_bit_for_bit(simulated, tmp_path) -> None:
    """F00: the same run twice, once on virtual sites and once between real processes."""
    with Federation(tmp_path, {"clinic": "demo:clinic", "kitchen": "demo:kitchen"}) as federation:
        run_id = federation.start(*SETTINGS, f"run.output-dir={tmp_path / 'run'}")
        status = federation.wait(run_id, seconds=300)
        facts = federation.facts(run_id)
        assert status == "finished:completed", (tmp_path / "run/server.log").read_text()[-3000:]
    real, virtual = (
        folder / "adapter" / "adapter_model.safetensors" for folder in (tmp_path / "run", simulated)
    )
    assert hashlib.sha256(real.read_bytes()).hexdigest() == hashlib.sha256(virtual.read_bytes()).hexdigest()
    crcs = [
        [
            json.loads(line)["state_crc"]
            for line in (folder / "events.jsonl").read_text().splitlines()
            if '"round_committed"' in line
        ]
        for folder in (tmp_path / "run", simulated)
    ]
    assert crcs[0] == crcs[1]
    assert len(crcs[0]) == 2
    # Our own count of payload bytes cannot exceed what Flower saw on the wire.
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["bytes_up"] <= facts["network-traffic"]["inbound-bytes"]


def test_the_adapter_loads_with_peft_alone_and_reproduces_the_served_model(simulated, tmp_path) -> None:
    """What was trained is what is exported: base + adapter = merged export, to 1e-5 in logits."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from umbel.models.source import ModelSpec, load_model

    done = umbel("export", str(simulated), "--merge", "--output", str(tmp_path / "merged"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    base = load_model(ModelSpec("builtin:tiny-llama"))
    served = PeftModel.from_pretrained(base, str(simulated / "adapter")).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        plain = load_model(ModelSpec("builtin:tiny-llama"))(input_ids=ids).logits
        difference = (served(input_ids=ids).logits - merged(input_ids=ids).logits).abs().max()
        moved = (served(input_ids=ids).logits - plain).abs().max()
    assert difference <= 1e-5
    assert moved > 1e-3
    text = "".join(p.read_text() for p in (simulated / "adapter").iterdir() if p.suffix in (".json", ".md"))
    assert str(simulated.parent) not in text
    assert "sites | clinic, kitchen" in text


def test_commands_that_look_at_a_run(simulated, tmp_path) -> None:
    for arguments, part in (
        (["ls", "--root", str(simulated.parent)], "run"),
        (["show", str(simulated)], "clinic"),
        (["watch", str(simulated), "--once"], "completed"),
        (["report", str(simulated)], "report.html"),
        (["recipes"], "smoke"),
        (["keys", "run.rounds"], "run.rounds = 3"),
        (["version"], "0.1.0"),
    ):
        done = umbel(*arguments, cwd=tmp_path)
        assert done.returncode == 0, (arguments, done.stderr)
        assert part in done.stdout, (arguments, done.stdout)


def test_a_second_run_into_the_same_folder_is_refused_and_resume_needs_the_same_settings(simulated) -> None:
    """F13 through the command line: the difference is named, nothing is overwritten."""
    folder = simulated.parent
    recipe = str(folder / "r.toml")
    before = (simulated / "events.jsonl").read_text()
    again = umbel("run", recipe, *overrides([*SETTINGS, f"run.output-dir={simulated}"]), cwd=folder)
    assert again.returncode == 78, again.stdout
    assert "already holds a run" in again.stdout + again.stderr
    other = umbel(
        "run",
        recipe,
        *overrides([*SETTINGS, f"run.output-dir={simulated}", "run.resume=auto", "train.learning-rate=0.5"]),
        cwd=folder,
    )
    assert other.returncode == 78, other.stdout
    assert "train.learning-rate: 0.01 -> 0.5" in other.stdout + other.stderr
    assert [line for line in before.splitlines() if "round_committed" in line] == [
        line for line in (simulated / "events.jsonl").read_text().splitlines() if "round_committed" in line
    ]
