"""GGUF files: converted once, exactly, and treated as plain models afterwards. A tiny file is written here."""

from __future__ import annotations

import json
import threading

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from umbel.errors import ModelError
from umbel.models import gguf as conversion
from umbel.models.adapter import LoraSettings, attach
from umbel.models.builtin import _byte_symbols
from umbel.models.export import merge_adapter, save_adapter
from umbel.models.fingerprint import base_fingerprint, weights_sha256
from umbel.models.source import ModelSpec, load_config, load_model, load_tokenizer
from umbel.models.state import read_state, write_state

HEADS, KV_HEADS = 4, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IDS = torch.arange(10)[None] * 13 % 250


def pairs_to_halves(weight, heads):
    """GGUF keeps the two halves of each rotary head interleaved."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(rows, -1)


def tiny_llama():
    config = AutoConfig.for_model(
        "llama",
        vocab_size=262,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def write_gguf(path, model, coded=()):
    """Write `model` as GGUF; the tensors named in `coded` as Q8_0. Returns the values a reader must see."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("Tiny Private Name")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(262)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    symbols = _byte_symbols()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*specials, *symbols, "ĠĠ", "he", "12"])
    writer.add_token_types([3, 3, 3] + [1] * 259)
    writer.add_token_merges(["Ġ Ġ", "h e", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    block, seen = "model.layers.0.", {}
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        f"{block}input_layernorm.weight": "blk.0.attn_norm.weight",
        f"{block}post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        f"{block}self_attn.q_proj.weight": "blk.0.attn_q.weight",
        f"{block}self_attn.k_proj.weight": "blk.0.attn_k.weight",
        f"{block}self_attn.v_proj.weight": "blk.0.attn_v.weight",
        f"{block}self_attn.o_proj.weight": "blk.0.attn_output.weight",
        f"{block}mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        f"{block}mlp.up_proj.weight": "blk.0.ffn_up.weight",
        f"{block}mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for key, array in read_state(model, "full").items():
        stored = array
        if "q_proj" in key or "k_proj" in key:
            stored = pairs_to_halves(array, HEADS if "q_proj" in key else KV_HEADS)
        if key in coded:
            kind = gguf.GGMLQuantizationType.Q8_0
            codes = gguf.quantize(stored, kind)
            writer.add_tensor(names[key], codes, raw_dtype=kind)
            array = gguf.dequantize(codes, kind)
        else:
            writer.add_tensor(names[key], np.ascontiguousarray(stored))
        seen[key] = array
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return seen


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("gguf")
    expected = write_gguf(root / "tiny.gguf", tiny_llama(), coded={"model.layers.0.mlp.up_proj.weight"})
    return ModelSpec(str(root / "tiny.gguf"), cache_dir=str(root / "cache")), expected


def test_dequantised_weights_are_exact_and_plain(tiny):
    """H23: the dequantised values, once, in a model that no longer counts as quantised."""
    spec, expected = tiny
    model = load_model(spec)
    state = read_state(model, "full")
    assert sorted(state) == sorted(expected)
    assert all(np.array_equal(state[key], expected[key]) for key in expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not getattr(model, "is_quantized", False)
    assert getattr(model, "hf_quantizer", None) is None
    (directory,) = [path for path in (spec.cache / "models").iterdir() if path.is_dir()]
    text = (directory / "config.json").read_text()
    assert "quantization" not in text
    assert "Tiny Private Name" not in text


def test_tokenizer_template_and_digit_rule(tiny):
    """H06: eos is <|im_end|>; blanks before a number are cut as in training, digits one by one."""
    tokenizer = load_tokenizer(tiny[0])
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("he  12") == ["he", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("he  12")["input_ids"]) == "he  12"
    turns = [{"role": "user", "content": "he"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text)["input_ids"].count(tokenizer.eos_token_id) == 1
    assert load_model(tiny[0]).generation_config.eos_token_id == 2


def test_conversion_runs_once(tiny, monkeypatch):
    load_model(tiny[0])
    monkeypatch.setattr(conversion, "_convert", lambda *_: pytest.fail("converted twice"))
    assert load_config(tiny[0]).num_key_value_heads == KV_HEADS
    assert base_fingerprint(tiny[0]) == weights_sha256(load_model(tiny[0]))


def test_two_at_once_convert_once(tiny, tmp_path, monkeypatch):
    calls = []
    convert = conversion._convert
    monkeypatch.setattr(conversion, "_convert", lambda *args: (calls.append(1), convert(*args)))
    spec = ModelSpec(tiny[0].name, cache_dir=str(tmp_path))
    threads = [threading.Thread(target=load_config, args=(spec,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert load_config(spec).vocab_size == 262


def test_adapter_and_merge_on_a_gguf_base(tiny, tmp_path):
    """H23: merged into the dequantised base; the exported adapter names the file without its folder."""
    spec, _ = tiny
    settings = LoraSettings(rank=2, alpha=9)
    model = attach(load_model(spec), settings).eval()
    generator = np.random.default_rng(0)
    state = {
        key: (array + generator.normal(0, 0.05, array.shape)).astype(np.float32)
        for key, array in read_state(model, "lora").items()
    }
    write_state(model, state, "lora")
    merge_adapter(spec, state, settings, tmp_path / "m", card="")
    merged = load_model(ModelSpec(str(tmp_path / "m")))
    with torch.no_grad():
        difference = (merged(IDS).logits - model(IDS).logits).abs().max()
    assert float(difference) <= 1e-5
    assert load_tokenizer(ModelSpec(str(tmp_path / "m"))).eos_token == "<|im_end|>"
    save_adapter(tmp_path / "a", state, settings, spec, card="")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny.gguf"


def test_unwritable_cache_is_named(tiny, tmp_path):
    """H36: a cache that cannot be written is an error with the remedy, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot be written.*UMBEL_CACHE"):
        load_config(ModelSpec(tiny[0].name, cache_dir=str(tmp_path / "file")))
