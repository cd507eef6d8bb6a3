"""What must differ differs, and what must not does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tokenizers import pre_tokenizers

from umbel.models import fingerprint
from umbel.models.adapter import LoraSettings, adapted_modules, attach
from umbel.models.fingerprint import (
    adapter_fingerprint,
    base_fingerprint,
    tokenizer_fingerprint,
    weights_sha256,
)
from umbel.models.source import ModelSpec, load_model, load_tokenizer, meta_model

LLAMA = ModelSpec("builtin:tiny-llama")


def test_builtin_base():
    same = ModelSpec("builtin:tiny-llama", attention="eager", gradient_checkpointing=True)
    assert base_fingerprint(LLAMA) == base_fingerprint(same)
    others = [ModelSpec("builtin:tiny-gpt2"), ModelSpec("builtin:tiny-llama", dtype="bfloat16")]
    assert len({base_fingerprint(spec) for spec in [LLAMA, *others]}) == 3


def test_directory_base_is_hashed_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    spec = ModelSpec(str(tmp_path / "m"), cache_dir=str(tmp_path / "cache"))
    model = load_model(LLAMA)
    model.save_pretrained(tmp_path / "m")
    first = base_fingerprint(spec)
    assert first == weights_sha256(model)
    with monkeypatch.context() as patched:
        patched.setattr(fingerprint, "load_model", lambda spec: pytest.fail("weights were read again"))
        assert base_fingerprint(spec) == first
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "m")
    second = base_fingerprint(spec)
    assert second == weights_sha256(model) != first
    for note in (tmp_path / "cache" / "fingerprints").iterdir():
        note.write_text("{")
    assert base_fingerprint(spec) == second


def test_tied_weights_are_hashed_once_under_one_name(tmp_path):
    """H09: the same model from memory and from a file that holds the tied matrix once."""
    spec = ModelSpec(str(tmp_path / "m"), cache_dir=str(tmp_path / "cache"))
    gpt2 = load_model(ModelSpec("builtin:tiny-gpt2"))
    gpt2.save_pretrained(tmp_path / "m")
    assert base_fingerprint(spec) == weights_sha256(gpt2)


def test_unwritable_cache_costs_time_only(tmp_path):
    (tmp_path / "file").write_text("")
    load_model(LLAMA).save_pretrained(tmp_path / "m")
    spec = ModelSpec(str(tmp_path / "m"), cache_dir=str(tmp_path / "file"))
    assert base_fingerprint(spec) == weights_sha256(load_model(LLAMA))


def test_tokenizer_differences_show():
    """H08: two added tokens, another eos, another template, another digit rule."""
    prints = [tokenizer_fingerprint(load_tokenizer(LLAMA))]
    assert prints[0] == tokenizer_fingerprint(load_tokenizer(ModelSpec("builtin:tiny-gpt2")))
    for change in (
        lambda t: t.add_tokens(["<a>", "<b>"]),
        lambda t: setattr(t, "eos_token", "<|pad|>"),
        lambda t: setattr(t, "chat_template", "x"),
        lambda t: setattr(
            t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
        ),
    ):
        tokenizer = load_tokenizer(LLAMA)
        change(tokenizer)
        prints.append(tokenizer_fingerprint(tokenizer))
    assert len(set(prints)) == 5
    assert [text.split("-")[0] for text in prints] == ["259", "261", "259", "259", "259"]


def test_adapter_differences_show():
    """H21, D06: the same tensors under alpha 8, alpha 64 or rsLoRA are another adapter; dropout is not."""
    base = LoraSettings(rank=8, alpha=8, target_modules="q_proj,v_proj")
    variants = [
        base,
        dataclasses.replace(base, alpha=64),
        dataclasses.replace(base, rslora=True),
        dataclasses.replace(base, rank=4),
        dataclasses.replace(base, alpha_pattern="v_proj=16"),
        dataclasses.replace(base, target_modules="q_proj,k_proj"),
        dataclasses.replace(base, dtype="bfloat16"),
    ]
    prints = [adapter_fingerprint(s, adapted_modules(attach(meta_model(LLAMA), s))) for s in variants]
    assert len(set(prints)) == len(variants)
    same = dataclasses.replace(base, dropout=0.5, alpha=8.0)
    modules = adapted_modules(attach(load_model(LLAMA), same))
    assert adapter_fingerprint(same, modules[::-1]) == prints[0]
    # The same settings on other layers, as `all-linear` gives on another base, are another adapter (H11).
    assert adapter_fingerprint(same, modules[1:]) != prints[0]
