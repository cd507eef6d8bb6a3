"""The exchanged arrays: names, bits, tied matrices, buffers, refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from umbel.errors import ModelError
from umbel.models.adapter import LoraSettings, attach
from umbel.models.names import canonical
from umbel.models.source import ModelSpec, load_model, meta_model
from umbel.models.state import read_state, role_of, state_tensors, to_torch, trainable_parameters, write_state

LLAMA = ModelSpec("builtin:tiny-llama")
GPT2 = ModelSpec("builtin:tiny-gpt2")
IDS = torch.arange(12)[None]


def adapter_of(spec=LLAMA, **settings):
    return attach(load_model(spec), LoraSettings(rank=2, target_modules="q_proj,v_proj", **settings))


def test_canonical_names():
    """H22: no wrapper prefix, no adapter name; taken apart at the dots."""
    q = "model.layers.0.self_attn.q_proj"
    assert next(iter(read_state(adapter_of(), "lora"))) == f"{q}.lora_A.weight"
    assert canonical(f"base_model.model.{q}.lora_B.default.weight") == f"{q}.lora_B.weight"
    assert canonical(f"base_model.model.{q}.lora_magnitude_vector.default.weight") == (
        f"{q}.lora_magnitude_vector"
    )
    assert canonical("base_model.model.score.modules_to_save.default.weight") == "score.weight"
    assert canonical(f"base_model.model.{q}.base_layer.weight") is None
    assert canonical("base_model.model.score.original_module.weight") is None
    # A module that is itself called like a factor or like the adapter keeps its name.
    assert canonical("base_model.model.lora_A.default.x.lora_A.default.weight") == (
        "lora_A.default.x.lora_A.weight"
    )
    assert [role_of(name) for name in (f"{q}.lora_A.weight", f"{q}.lora_B.weight")] == ["lora_A", "lora_B"]
    assert [role_of(name) for name in ("lora_A.weight2", "score.weight", "buffer:bn.running_var")] == [
        "param",
        "param",
        "buffer",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_round_trip_is_bit_identical(dtype, mode):
    """H16, H22, D15: own dtype, own bytes, also for NaN payloads and negative zero."""
    spec = ModelSpec("builtin:tiny-llama", dtype=dtype)

    def fresh():
        return adapter_of(spec, dtype=dtype) if mode == "lora" else load_model(spec)

    source = read_state(fresh(), mode)
    generator = np.random.default_rng(0)
    size = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).itemsize
    bits = {2: np.uint16, 4: np.uint32}[size]
    arrays = {
        k: generator.integers(0, np.iinfo(bits).max, v.shape, dtype=bits, endpoint=True).view(v.dtype)
        for k, v in source.items()
    }
    assert {a.dtype.itemsize for a in source.values()} == {size}
    model = fresh()
    write_state(model, arrays, mode)
    back = read_state(model, mode)
    assert list(back) == list(arrays)
    assert all(back[k].tobytes() == arrays[k].tobytes() and back[k].dtype == arrays[k].dtype for k in arrays)


def test_arrays_are_copies_in_both_directions():
    model = adapter_of()
    arrays = read_state(model, "lora")
    name = next(iter(arrays))
    arrays[name][:] = 5.0
    assert not (read_state(model, "lora")[name] == 5.0).any()
    write_state(model, arrays, "lora")
    arrays[name][:] = 6.0
    assert (read_state(model, "lora")[name] == 5.0).all()
    frozen = np.ones((2, 3), np.float32)
    frozen.flags.writeable = False
    to_torch(frozen).zero_()
    assert frozen.all()


def test_tied_matrix_travels_once_and_counts_once():
    """H09: 182,208 parameters of tiny GPT-2, not 182,208 + 259 x 64."""
    arrays = read_state(load_model(GPT2), "full")
    assert sum(array.nbytes for array in arrays.values()) == 4 * 182_208
    assert "transformer.wte.weight" in arrays
    assert "lm_head.weight" not in arrays
    arrays["transformer.wte.weight"][:] = 0.5
    model = load_model(GPT2)
    write_state(model, arrays, "full")
    assert bool((model.lm_head.weight == 0.5).all())


@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [
        (
            {
                "model_type": "gpt2",
                "n_embd": 1024,
                "n_layer": 24,
                "n_head": 16,
            },
            1_419_292_672,
        ),
        (
            {
                "model_type": "llama",
                "vocab_size": 128_256,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
            4_943_257_600,
        ),
    ],
)
def test_full_exchange_bytes_of_tied_models(settings, num_bytes):
    """H09: GPT-2 Medium and Llama-3.2-1B, measured on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    tensors = state_tensors(model, "full")
    parameters = [t for name, t in tensors.items() if role_of(name) == "param"]
    assert sum(4 * tensor.numel() for tensor in parameters) == num_bytes


class Odd(nn.Module):
    """Buffers of every kind a checkpoint may hold, and a weight shared by assignment."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.norm.num_batches_tracked += 13
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("gain", torch.tensor(1.5, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_buffers_keep_shape_and_dtype():
    """H13, H14: 0-d integers, booleans and empty tensors; buffers are marked as such by name."""
    arrays = read_state(Odd(), "full")
    assert list(arrays) == [
        "first.weight",
        "norm.weight",
        "norm.bias",
        "buffer:mask",
        "buffer:empty",
        "buffer:gain",
        "buffer:norm.running_mean",
        "buffer:norm.running_var",
        "buffer:norm.num_batches_tracked",
    ]
    count = arrays["buffer:norm.num_batches_tracked"]
    assert isinstance(count, np.ndarray)
    assert (count.shape, count.dtype, int(count)) == ((), np.int64, 13)
    assert arrays["buffer:mask"].dtype == np.bool_
    assert arrays["buffer:empty"].shape == (0, 4)
    assert arrays["buffer:gain"].dtype == ml_dtypes.bfloat16
    assert arrays["buffer:gain"].shape == ()
    arrays["buffer:norm.num_batches_tracked"] = np.array(10)
    arrays["buffer:gain"] = np.array(-2.5, ml_dtypes.bfloat16)
    model = Odd()
    write_state(model, arrays, "full")
    assert int(model.norm.num_batches_tracked) == 10
    assert float(model.gain) == -2.5


def test_wrong_keys_are_named_and_change_nothing():
    """H22, D15: stock PEFT returns unknown keys and raises nothing."""
    model = adapter_of()
    before = read_state(model, "lora")
    prefixed = {f"base_model.model.{name}": array + 1 for name, array in before.items()}
    with pytest.raises(ModelError) as caught:
        write_state(model, prefixed, "lora")
    text = str(caught.value)
    assert "8 names missing, 8 unexpected" in text
    assert text.count("'base_model.model.") == 3
    assert "and 5 more" in text
    short = dict(list(before.items())[1:])
    with pytest.raises(
        ModelError, match=r"missing 'model.layers.0.self_attn.q_proj.lora_A.weight'; unexpected none"
    ):
        write_state(model, short, "lora")
    for wrong in (lambda a: a[:1], lambda a: a.astype(np.float16), lambda a: a.astype(">f4")):
        arrays = {name: array + 1 for name, array in before.items()}
        last = list(arrays)[-1]
        arrays[last] = wrong(arrays[last])
        with pytest.raises(ModelError, match=last):
            write_state(model, arrays, "lora")
    after = read_state(model, "lora")
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_tensors_that_cannot_travel_are_named():
    """H16, H23: fp8, meta and packed codes give an error with the key."""

    class Coded(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

    with pytest.raises(ModelError, match=r"'weight' cannot be exchanged, got 'torch.float8_e4m3fn'"):
        read_state(Coded(torch.ones(2, 2).to(torch.float8_e4m3fn)), "full")
    with pytest.raises(ModelError, match=r"'weight' cannot be exchanged, got 'torch.uint8'"):
        read_state(Coded(torch.ones(2, 2, dtype=torch.uint8)), "full")
    with pytest.raises(ModelError, match=r"embed_tokens.weight' cannot be exchanged, got 'meta"):
        read_state(meta_model(LLAMA), "full")


def test_mode_must_fit_the_model():
    for model, mode in ((load_model(LLAMA), "lora"), (adapter_of(), "full"), (adapter_of(), "both")):
        with pytest.raises(ModelError, match="mode does not fit"):
            read_state(model, mode)


def test_trainable_parameters_are_exactly_the_exchanged_ones():
    model = load_model(GPT2)
    parameters = trainable_parameters(model, "full")
    assert sum(p.numel() for p in parameters) == 182_208
    assert all(p.requires_grad for p in parameters)
    assert trainable_parameters(Odd(), "full")[0].shape == (3, 3)


@pytest.mark.parametrize(
    ("factor", "moving"), [("", {"lora_A", "lora_B"}), ("A", {"lora_A"}), ("B", {"lora_B"})]
)
def test_frozen_factor_stays_bit_identical(factor, moving):
    """D04: the factor is frozen on the attached adapter, so after local steps it is what the server sent."""
    model = adapter_of()
    state = {k: v + np.float32(0.1) for k, v in read_state(model, "lora").items()}
    write_state(model, state, "lora")
    optimizer = torch.optim.AdamW(trainable_parameters(model, "lora", factor), lr=0.1)
    model.train()(IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    after = read_state(model, "lora")
    changed = {role_of(k) for k in state if not np.array_equal(state[k], after[k])}
    still = {role_of(k) for k in state if np.array_equal(state[k], after[k])}
    assert changed == moving
    assert not changed & still
    with pytest.raises(ModelError, match="factor"):
        trainable_parameters(model, "lora", "C")
