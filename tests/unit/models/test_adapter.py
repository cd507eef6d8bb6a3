"""LoRA attached to a base: which layers, which scale, which first values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_test
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from umbel.errors import ModelError
from umbel.models.adapter import (
    LoraSettings,
    adapted_modules,
    attach,
    initial_adapter,
    scale_of,
    unadapted_matrices,
)
from umbel.models.source import ModelSpec, load_model, meta_model
from umbel.models.state import read_state, trainable_parameters, write_state

LLAMA = ModelSpec("builtin:tiny-llama")
GPT2 = ModelSpec("builtin:tiny-gpt2")
IDS = torch.arange(24).reshape(2, 12) * 5 % 256


def small(model_type, **extra):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes, **heads, **extra)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_all_linear_list_and_shapes():
    """H11: the list is explicit; Conv1D shapes are (in, out) of the map, not of the storage (H10)."""
    llama = adapted_modules(attach(meta_model(LLAMA), LoraSettings(rank=4, alpha=32)))
    assert len(llama) == 14
    assert llama[1] == ("model.layers.0.self_attn.k_proj", "Linear", 64, 32, 4, 8.0, False)
    gpt2 = adapted_modules(attach(meta_model(GPT2), LoraSettings(rank=4, alpha=32)))
    assert len(gpt2) == 8
    assert gpt2[0] == ("transformer.h.0.attn.c_attn", "Conv1D", 64, 192, 4, 8.0, True)
    assert not any("lm_head" in module.name for module in llama + gpt2)


@pytest.mark.parametrize("targets", ["q_proj,none_proj", "mlp", "q_proj,act_fn", "layers"])
def test_a_wrong_target_name_is_an_error_beside_a_right_one(targets):
    """H11."""
    with pytest.raises(ModelError, match=r"q_proj.*the other names do not make up"):
        attach(meta_model(LLAMA), LoraSettings(target_modules=targets))


def test_fused_projections_are_named_in_the_error():
    """H11: a Phi-3 style fused QKV has no q_proj."""
    model = small("phi3")
    with pytest.raises(ModelError, match=r"'q_proj' matches no layer.*qkv_proj"):
        attach(model, LoraSettings(target_modules="q_proj"))


def test_frozen_experts_are_reported():
    """H11: experts of a mixture stay frozen; they are listed rather than passed over."""
    model = small("mixtral", num_local_experts=2, num_experts_per_tok=1)
    adapted = attach(model, LoraSettings(target_modules="q_proj,v_proj"))
    assert [module.name.rpartition(".")[2] for module in adapted_modules(adapted)] == ["q_proj", "v_proj"]
    assert any("experts" in name for name in unadapted_matrices(adapted))
    assert not any("lora" in name or "q_proj" in name for name in unadapted_matrices(adapted))


def test_tied_head_is_refused_untied_is_not():
    """H09: adapting or saving a tied head would change the embedding."""
    for bad in (
        {"target_modules": "lm_head"},
        {"target_modules": "lm_head,c_attn"},
        {"modules_to_save": "wte"},
    ):
        with pytest.raises(ModelError, match="tied"):
            attach(load_model(GPT2), LoraSettings(**bad))
    assert len(adapted_modules(attach(load_model(LLAMA), LoraSettings(target_modules="lm_head")))) == 1


def test_task_head_must_be_exchanged():
    """H12: a random classifier head is an error, or is trained, read and written like the adapter."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=40,
        num_labels=3,
        pad_token_id=0,
    )
    with pytest.raises(ModelError, match="modules_to_save = 'score'"):
        attach(LlamaForSequenceClassification(config), LoraSettings(target_modules="q_proj"))
    settings = LoraSettings(target_modules="q_proj", modules_to_save="score")
    torch.manual_seed(0)
    server_base = LlamaForSequenceClassification(config)
    site_base = LlamaForSequenceClassification(config)
    site_base.model.load_state_dict(server_base.model.state_dict())
    server, site = attach(server_base, settings).eval(), attach(site_base, settings).eval()
    ids = IDS % 40
    assert not torch.allclose(server(ids).logits, site(ids).logits)
    state = read_state(server, "lora")
    assert "score.weight" in state
    write_state(site, state, "lora")
    assert torch.equal(server(ids).logits, site(ids).logits)


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_first_values_do_not_depend_on_the_random_state(spec):
    settings = LoraSettings(rank=4)
    torch.manual_seed(1)
    first = attach(load_model(spec), settings)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = attach(load_model(spec), settings)
    assert torch.equal(before, torch.get_rng_state())
    a, b = read_state(first, "lora"), read_state(second, "lora")
    expected = initial_adapter(adapted_modules(first), settings, seed=0)
    assert list(a) == list(expected)
    assert all(np.array_equal(a[k], b[k]) and np.array_equal(a[k], expected[k]) for k in a)
    assert torch.equal(first.eval()(IDS).logits, load_model(spec)(IDS).logits)


def test_initial_adapter_distribution_order_and_dtype():
    modules = adapted_modules(attach(meta_model(LLAMA), LoraSettings(rank=64)))
    arrays = initial_adapter(modules, LoraSettings(rank=64), seed=3)
    a = arrays["model.layers.1.mlp.down_proj.lora_A.weight"]
    bound = 1 / math.sqrt(128)
    assert a.shape == (64, 128)
    assert a.dtype == np.float32
    assert np.abs(a).max() <= bound
    # Uniform: standard deviation bound/sqrt(3); 8192 draws give it to about 1 %.
    assert a.std() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert not arrays["model.layers.1.mlp.down_proj.lora_B.weight"].any()
    backwards = initial_adapter(modules[::-1], LoraSettings(rank=64), seed=3)
    assert all(np.array_equal(arrays[k], backwards[k]) for k in arrays)
    half = initial_adapter(modules, LoraSettings(rank=64, dtype="bfloat16"), seed=3)
    assert all(half[k].tobytes() == arrays[k].astype(half[k].dtype).tobytes() for k in arrays)
    other = initial_adapter(modules, LoraSettings(rank=64), seed=4)
    assert not np.array_equal(other["model.layers.1.mlp.down_proj.lora_A.weight"], a)


def test_scale_by_hand():
    """D07: one function; alpha 32 and rank 16 give 2, not 1 (D05)."""
    assert scale_of(LoraSettings(rank=16, alpha=32), "x") == 2.0
    assert scale_of(LoraSettings(rank=16, alpha=32, rslora=True), "x") == 8.0
    mixed = LoraSettings(rank=8, alpha=16, rank_pattern="q_proj=4", alpha_pattern=r"layers\.1\.\w+\.q_proj=2")
    assert scale_of(mixed, "m.layers.0.attn.q_proj") == 4.0
    assert scale_of(mixed, "m.layers.1.attn.q_proj") == 0.5
    assert scale_of(mixed, "m.layers.1.attn.my_q_proj") == 2.0


@settings_of_test(max_examples=40, deadline=None)
@given(
    rank=st.integers(1, 8),
    alpha=st.floats(0.1, 100),
    rslora=st.booleans(),
    patterns=st.sampled_from([("", ""), ("q_proj=3", ""), (r"layers.0.*.k_proj=2,k_proj=5", "v_proj=7")]),
)
def test_scale_is_the_one_peft_applies(rank, alpha, rslora, patterns):
    """D07: the factor that a forward pass really uses."""
    settings = LoraSettings(
        rank=rank,
        alpha=alpha,
        rslora=rslora,
        target_modules="q_proj,k_proj,v_proj",
        rank_pattern=patterns[0],
        alpha_pattern=patterns[1],
    )
    for module in adapted_modules(attach(small("llama"), settings)):
        assert module.scale == scale_of(settings, module.name)


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": 0},
        {"alpha": 0.0},
        {"alpha": float("nan")},
        {"dropout": 1.0},
        {"dtype": "int8"},
        {"target_modules": " , "},
        {"rank_pattern": "q_proj"},
        {"rank_pattern": "q_proj=1.5"},
        {"rank_pattern": "q_proj=inf"},
        {"rank_pattern": "(=4"},
        {"alpha_pattern": "q_proj=-1"},
    ],
)
def test_settings_validate_themselves(bad):
    with pytest.raises(ModelError, match=r"got .*Allowed: "):
        LoraSettings(**bad)


def test_patterns_and_saved_modules_that_match_nothing():
    for bad in ({"rank_pattern": "c_attn=4"}, {"alpha_pattern": "zzz=4"}, {"modules_to_save": "classifier"}):
        with pytest.raises(ModelError, match="matches no"):
            attach(meta_model(LLAMA), LoraSettings(**bad))


@pytest.mark.parametrize("base", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", ["float32", "bfloat16"])
def test_adapter_dtype_is_its_own(base, adapter):
    """H16: the adapter keeps its dtype on any base."""
    model = attach(load_model(ModelSpec("builtin:tiny-llama", dtype=base)), LoraSettings(dtype=adapter))
    assert {str(a.dtype) for a in read_state(model, "lora").values()} == {adapter}
    assert model(IDS).logits.dtype == getattr(torch, base)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_every_adapter_gets_a_gradient_behind_frozen_embeddings(spec, checkpointing):
    """H19: also with gradient checkpointing, and equal to the gradients without it."""
    grads = {}
    for flag in (False, checkpointing):
        model = attach(load_model(ModelSpec(spec.name, gradient_checkpointing=flag)), LoraSettings(rank=4))
        parameters = trainable_parameters(model, "lora")
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                parameter.add_(0.01 * (1 + index % 3))
        model.train()
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) == flag
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        grads[flag] = [parameter.grad for parameter in parameters]
    assert all(bool(grad.abs().sum() > 0) for grad in grads[checkpointing])
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(grads[False], grads[checkpointing]))


def test_dora_magnitudes_are_part_of_the_state():
    model = attach(load_model(LLAMA), LoraSettings(rank=2, dora=True, target_modules="k_proj"))
    state = read_state(model, "lora")
    assert list(state)[:3] == [
        "model.layers.0.self_attn.k_proj.lora_A.weight",
        "model.layers.0.self_attn.k_proj.lora_B.weight",
        "model.layers.0.self_attn.k_proj.lora_magnitude_vector",
    ]
    weight = load_model(LLAMA).model.layers[0].self_attn.k_proj.weight.numpy()
    expected = np.linalg.norm(weight, axis=1)
    np.testing.assert_allclose(state[list(state)[2]], expected, rtol=1e-6)
