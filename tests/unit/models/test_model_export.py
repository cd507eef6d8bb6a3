"""What is exported is what was trained: adapter, merged model, full model."""

from __future__ import annotations

import json
import socket

import ml_dtypes
import numpy as np
import pytest
import torch

from umbel.errors import ModelError
from umbel.models.adapter import LoraSettings, adapted_modules, attach
from umbel.models.directory import atomic_directory
from umbel.models.export import merge_adapter, save_adapter, save_full
from umbel.models.fingerprint import tokenizer_fingerprint
from umbel.models.source import ModelSpec, load_model, load_tokenizer, meta_model
from umbel.models.state import read_state, write_state

LLAMA = ModelSpec("builtin:tiny-llama")
GPT2 = ModelSpec("builtin:tiny-gpt2")
IDS = torch.arange(40).reshape(2, 20) * 7 % 256
# alpha differs from rank everywhere (D05), one layer has its own rank and alpha (D07).
CASES = [
    (LLAMA, LoraSettings(rank=4, alpha=32, rank_pattern="k_proj=2", alpha_pattern="v_proj=6")),
    (GPT2, LoraSettings(rank=4, alpha=32, rank_pattern="c_fc=3")),
    (LLAMA, LoraSettings(rank=4, alpha=6, rslora=True, modules_to_save="lm_head")),
    (GPT2, LoraSettings(rank=3, alpha=5, dora=True, target_modules="c_attn")),
    (LLAMA, LoraSettings(rank=2, alpha=8, target_modules="q_proj,layers.1.mlp.up_proj")),
]


def trained(spec, settings, seed=0):
    """Return an adapted model with non-zero factors and its state."""
    model = attach(load_model(spec), settings).eval()
    generator = np.random.default_rng(seed)
    state = {
        name: (array + generator.normal(0, 0.02, array.shape)).astype(array.dtype)
        for name, array in read_state(model, "lora").items()
    }
    write_state(model, state, "lora")
    return model, state


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(("spec", "settings"), CASES)
def test_base_plus_adapter_equals_merged_and_reloaded(spec, settings, tmp_path, monkeypatch):
    """H10, H23, D02, D05, D07, D15: Linear, Conv1D, tied, saved head; the network is blocked."""
    from peft import PeftModel

    def no_network(*args, **kwargs):
        raise AssertionError("an export or its reader opened a connection")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    model, state = trained(spec, settings)
    expected = logits(model)
    assert float((expected - logits(load_model(spec))).abs().max()) > 0.02

    save_adapter(tmp_path / "adapter", state, settings, spec, card="# adapter\n")
    reloaded = PeftModel.from_pretrained(load_model(spec), tmp_path / "adapter")
    assert torch.equal(logits(reloaded), expected)

    difference = merge_adapter(spec, state, settings, tmp_path / "merged", card="# merged\n")
    merged = load_model(ModelSpec(str(tmp_path / "merged")))
    assert difference <= 1e-5
    assert float((logits(merged) - expected).abs().max()) <= 1e-5
    assert (tmp_path / "merged/README.md").read_text() == "# merged\n"


def test_merged_weights_by_hand(tmp_path):
    """H10, H23: W + s B A for Linear, transposed for Conv1D (64 x 192), to 1e-6; other weights untouched."""
    for spec, key in ((LLAMA, "model.layers.0.self_attn.k_proj"), (GPT2, "transformer.h.0.attn.c_attn")):
        settings = LoraSettings(rank=4, alpha=32, target_modules=key.rpartition(".")[2])
        _, state = trained(spec, settings)
        merge_adapter(spec, state, settings, tmp_path / "m", card="")
        base = read_state(load_model(spec), "full")
        merged = read_state(load_model(ModelSpec(str(tmp_path / "m"))), "full")
        update = 8.0 * state[f"{key}.lora_B.weight"] @ state[f"{key}.lora_A.weight"]
        module = adapted_modules(attach(meta_model(spec), settings))[0]
        expected = base[f"{key}.weight"] + (update.T if module.fan_in_fan_out else update)
        np.testing.assert_allclose(merged[f"{key}.weight"], expected, atol=1e-6)
        changed = {name for name in base if not np.array_equal(base[name], merged[name])}
        assert changed == {name for name in base if f"{key.rpartition('.')[2]}.weight" in name}


def test_adapter_files_hold_adapter_keys_only_and_no_local_path(tmp_path):
    """D15, H09: no embeddings; a directory base is named by its last part."""
    from safetensors.numpy import load_file

    home = tmp_path / "home" / "tiny-base"
    load_model(LLAMA).save_pretrained(home)
    load_tokenizer(LLAMA).save_pretrained(home)
    spec, settings = ModelSpec(str(home)), LoraSettings(rank=2, target_modules="q_proj,v_proj", dropout=0.1)
    _, state = trained(spec, settings)
    save_adapter(tmp_path / "a", state, settings, spec, card="x")
    merge_adapter(spec, state, settings, tmp_path / "m", card="x")
    weights = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert sorted(weights) == sorted(f"base_model.model.{name}" for name in state)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny-base"
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (2, 16, "CAUSAL_LM")
    for path in [*(tmp_path / "a").iterdir(), *(tmp_path / "m").iterdir()]:
        assert str(tmp_path).encode() not in path.read_bytes(), path
        assert path.stat().st_mode & 0o777 == 0o644 & path.parent.stat().st_mode


def test_generation_config_stops_at_the_token_trained_on(tmp_path):
    """H06: the tokenizer's eos joins the model's own."""
    base = load_model(LLAMA)
    base.generation_config.eos_token_id = 0
    base.save_pretrained(tmp_path / "base")
    tokenizer = load_tokenizer(LLAMA)
    tokenizer.save_pretrained(tmp_path / "base")
    spec, settings = ModelSpec(str(tmp_path / "base")), LoraSettings(rank=2)
    _, state = trained(spec, settings)
    merge_adapter(spec, state, settings, tmp_path / "m", card="")
    merged = load_model(ModelSpec(str(tmp_path / "m")))
    assert merged.generation_config.eos_token_id == [0, 257]
    assert merged.generation_config.pad_token_id == 258
    assert merged.generation_config.use_cache is True
    assert json.loads((tmp_path / "m/config.json").read_text())["use_cache"] is True
    assert tokenizer_fingerprint(load_tokenizer(ModelSpec(str(tmp_path / "m")))) == (
        tokenizer_fingerprint(tokenizer)
    )


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_full_export_round_trip(spec, tmp_path):
    """H09: a tied model is saved once and reloads tied."""
    state = {name: array + np.float32(0.01) for name, array in read_state(load_model(spec), "full").items()}
    save_full(tmp_path / "a", spec, state, card="c")
    save_full(tmp_path / "b", load_model(spec), state, spec=spec, card="c")
    for name in "ab":
        back = read_state(load_model(ModelSpec(str(tmp_path / name))), "full")
        assert all(np.array_equal(back[key], state[key]) for key in state)
        assert len(back) == len(state)
    with pytest.raises(ModelError, match="spec is missing"):
        save_full(tmp_path / "c", load_model(spec), state, card="c")


def test_bfloat16_adapter_and_merged_dtype(tmp_path):
    """H16: bf16 factors are stored in two bytes; the merged model has the base's dtype."""
    from safetensors import safe_open

    spec = ModelSpec("builtin:tiny-llama", dtype="bfloat16")
    settings = LoraSettings(rank=2, dtype="bfloat16", target_modules="q_proj")
    _, state = trained(spec, settings)
    assert {a.dtype for a in state.values()} == {np.dtype(ml_dtypes.bfloat16)}
    save_adapter(tmp_path / "a", state, settings, spec, card="")
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "pt") as file:
        for name, array in state.items():
            tensor = file.get_tensor(f"base_model.model.{name}")
            assert tensor.dtype == torch.bfloat16
            assert tensor.view(torch.int16).numpy().tobytes() == array.tobytes()
    merge_adapter(spec, state, settings, tmp_path / "m", card="")
    assert json.loads((tmp_path / "m/config.json").read_text())["dtype"] == "bfloat16"


def test_wrong_arrays_are_refused_and_leave_no_file(tmp_path):
    """H22, D15."""
    settings = LoraSettings(rank=2, target_modules="q_proj")
    _, state = trained(LLAMA, settings)
    first = next(iter(state))
    for bad in (
        {k: v for k, v in state.items() if k != first},
        {**state, "x.lora_A.weight": state[first]},
        {**state, first: state[first][:1]},
    ):
        for export in (
            lambda bad=bad: save_adapter(tmp_path / "a", bad, settings, LLAMA, card=""),
            lambda bad=bad: merge_adapter(LLAMA, bad, settings, tmp_path / "a", card=""),
        ):
            with pytest.raises(ModelError, match=r"lora_A"):
                export()
    assert list(tmp_path.iterdir()) == []


def test_directory_is_replaced_whole_or_kept(tmp_path):
    target = tmp_path / "out"
    with atomic_directory(target) as directory:
        (directory / "old").write_text("1")
        assert not target.exists()

    def interrupted():
        with atomic_directory(target) as directory:
            (directory / "new").write_text("2")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert [path.name for path in target.iterdir()] == ["old"]
    with atomic_directory(target) as directory:
        (directory / "new").write_text("2")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
