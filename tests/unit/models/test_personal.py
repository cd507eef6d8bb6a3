"""Interpolation of two adapters and the form without patterns: dense oracles, PEFT's own loader, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest

from umbel.errors import UmbelError
from umbel.exchange import A, B
from umbel.models.adapter import adapted_modules, attach
from umbel.models.export import save_adapter
from umbel.models.lora import LoraSettings, scale_of
from umbel.models.personal import interpolated, read_adapter, uniform
from umbel.models.source import ModelSpec, load_model
from umbel.models.state import read_state, write_state

SHARED = LoraSettings(rank=4, alpha=12, target_modules="q_proj,down_proj")
OWN = LoraSettings(rank=2, alpha=5, rslora=True, target_modules="q_proj,down_proj")
PATTERN = LoraSettings(
    rank=4, alpha=8, rank_pattern="q_proj=2", alpha_pattern="down_proj=20", target_modules="q_proj,down_proj"
)
LLAMA = ModelSpec("builtin:tiny-llama")


def drawn(settings: LoraSettings, seed: int, spec: ModelSpec = LLAMA):
    rng = np.random.default_rng(seed)
    model = attach(load_model(spec), settings)
    state = {
        n: (0.1 * rng.normal(size=a.shape)).astype(a.dtype) for n, a in read_state(model, "lora").items()
    }
    return model, state, settings


def dense(state, settings, module: str) -> np.ndarray:
    return (
        scale_of(settings, module)
        * state[module + B].astype(np.float64)
        @ state[module + A].astype(np.float64)
    )


def logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12)[None] * 5, use_cache=False).logits.double().numpy()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_mixture_is_that_of_the_updates(share: float) -> None:
    """Unequal ranks and scales; at the ends each adapter alone."""
    model, shared, _ = drawn(SHARED, 1)
    _, own, _ = drawn(OWN, 2)
    found, settings = interpolated((shared, SHARED), (own, OWN), share)
    assert (settings.rank, settings.alpha, settings.rslora) == (6, 6.0, False)
    for m in adapted_modules(model):
        want = (1 - share) * dense(shared, SHARED, m.name) + share * dense(own, OWN, m.name)
        got = dense(found, settings, m.name)
        assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize(
    ("name", "ranks", "alphas"),
    [("tiny-llama", "q_proj=2", "down_proj=20"), ("tiny-gpt2", "c_attn=2", "c_proj=20")],
)
def test_an_adapter_without_patterns_has_the_logits_of_the_one_with(
    tmp_path, name: str, ranks: str, alphas: str
) -> None:
    """Linear and Conv1D; the file read by PEFT itself says nothing that a server of many adapters does not read."""
    from peft import PeftModel

    spec = ModelSpec(f"builtin:{name}")
    settings = LoraSettings(rank=4, alpha=8, rank_pattern=ranks, alpha_pattern=alphas)
    model, state, _ = drawn(settings, 3, spec)
    write_state(model, state, "lora")
    plain, changed = uniform(state, settings)
    save_adapter(tmp_path / "adapter", plain, changed, spec, card="# test\n")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert (config["r"], config["lora_alpha"], config["bias"], config["use_dora"]) == (4, 4.0, "none", False)
    assert config["modules_to_save"] is None
    loaded = PeftModel.from_pretrained(load_model(spec), str(tmp_path / "adapter"))
    assert np.abs(logits(loaded) - logits(model)).max() <= 1e-5
    assert np.abs(logits(loaded.merge_and_unload()) - logits(model)).max() <= 1e-5


def test_a_folder_gives_back_what_was_saved(tmp_path) -> None:
    model, state, _ = drawn(PATTERN, 4)
    save_adapter(tmp_path / "own", state, PATTERN, LLAMA, card="# test\n")
    found, settings = read_adapter(tmp_path / "own", SHARED)
    assert all(np.array_equal(found[n], a) for n, a in state.items())
    assert set(found) == set(state)
    for m in adapted_modules(model):
        assert scale_of(settings, m.name) == m.scale == scale_of(PATTERN, m.name)


def test_other_layers_wrong_shares_and_no_adapter_are_refused(tmp_path) -> None:
    _, shared, _ = drawn(SHARED, 1)
    other = {n: a for n, a in shared.items() if "down_proj" in n}
    with pytest.raises(UmbelError, match="same layers"):
        interpolated((shared, SHARED), (other, SHARED), 0.5)
    with pytest.raises(UmbelError, match="more than factors"):
        interpolated((shared, SHARED), ({**shared, "score.weight": np.zeros((2, 2))}, SHARED), 0.5)
    with pytest.raises(UmbelError, match="share"):
        interpolated((shared, SHARED), (shared, SHARED), 1.5)
    with pytest.raises(UmbelError, match="no adapter"):
        read_adapter(tmp_path, SHARED)
