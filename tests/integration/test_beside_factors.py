"""DoRA's magnitudes and modules trained whole: from the server's base, averaged plainly, exported for PEFT."""

from __future__ import annotations

import numpy as np
import pytest
from support.inprocess import make_session

import client_app.train_round
from client_app.tasks.work import local_work
from server_app.start import prepare
from umbel import checkpoints
from umbel.config import resolve
from umbel.errors import ConfigError
from umbel.models.source import ModelSpec, load_model
from umbel.models.state import read_state

SMALL = (
    "run.method=fedit",
    "run.rounds=1",
    "lora.rank=2",
    "lora.alpha=6",
    "data.limit=8",
    "data.max-length=64",
)
CASES = {
    "dora on Linear": ("model.name=builtin:tiny-llama", "lora.target-modules=k_proj", "lora.dora=true"),
    "dora on Conv1D": ("model.name=builtin:tiny-gpt2", "lora.target-modules=c_attn", "lora.dora=true"),
    "a norm trained whole": (
        "model.name=builtin:tiny-llama",
        "lora.target-modules=q_proj",
        "lora.modules-to-save=model.norm",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_stands_beside_the_factors_is_averaged_and_loads_in_peft(
    monkeypatch, tmp_path, case: str
) -> None:
    """The committed tensors are the sites' mean weighted by tokens; PEFT's own loader gives the sites' next start."""
    import torch
    from peft import PeftModel

    held = {}

    def work(trains, model, *args, **kwargs):
        result = local_work(trains, model, *args, **kwargs)
        held[kwargs["site"]] = (result.tokens, {n: a.astype(np.float64) for n, a in result.arrays.items()})
        return result

    monkeypatch.setattr(client_app.train_round, "local_work", work)
    settings = (*SMALL, *CASES[case], "clients.minimum=2")
    session = make_session(tmp_path, *settings, sites=("clinic", "kitchen"))
    start = prepare(session.config).state
    assert session.run() == 0, (tmp_path / "run" / "server.log").read_text()[-2000:]
    state = checkpoints.load_newest(tmp_path / "run" / "checkpoints").state
    beside = [n for n in state if "lora_A" not in n and "lora_B" not in n]
    assert any(np.abs(state[n] - start[n]).max() > 0 for n in beside)
    total = sum(tokens for tokens, _ in held.values())
    for name, array in state.items():
        mean = sum(tokens / total * arrays[name] for tokens, arrays in held.values())
        np.testing.assert_allclose(array, mean, rtol=1e-6, atol=1e-7)

    spec = ModelSpec(session.config.model.name)
    loaded = PeftModel.from_pretrained(load_model(spec), str(tmp_path / "run" / "adapter"))
    found = read_state(loaded, "lora")
    assert set(found) == set(state)
    assert all(np.array_equal(found[n], state[n]) for n in state)
    ids = torch.arange(12)[None] * 5
    with torch.no_grad():
        before = loaded.eval()(input_ids=ids, use_cache=False).logits
        merged = loaded.merge_and_unload().eval()(input_ids=ids, use_cache=False).logits
    assert float((before - merged).abs().max()) <= 1e-5


@pytest.mark.parametrize("setting", ["lora.dora=true", "lora.modules-to-save=model.norm"])
@pytest.mark.parametrize(
    "other", ["run.method=carry", "run.method=rolora", "train.mode=full", "clients.merge=norm-clipping"]
)
def test_a_rule_that_knows_factors_alone_refuses_them(setting: str, other: str) -> None:
    key = setting.split("=")[0]
    with pytest.raises(ConfigError, match=key):
        resolve(None, ["run.method=fedit", setting, other, "clients.minimum=8"])
