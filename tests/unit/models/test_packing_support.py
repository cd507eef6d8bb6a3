"""Packed rows see only themselves, and the two calls that silently break it are known to."""

from __future__ import annotations

import pytest
import torch

from umbel.models.adapter import LoraSettings, attach
from umbel.models.packing import supports_packing
from umbel.models.source import ModelSpec, load_model

NAMES = ["builtin:tiny-llama", "builtin:tiny-gpt2"]
ROWS = [torch.arange(n)[None] * 11 % 256 for n in (7, 11, 5)]
PACKED = torch.cat(ROWS, dim=1)
POSITIONS = torch.cat([torch.arange(row.shape[1]) for row in ROWS])[None]


def separate(model):
    return torch.cat([model(row, use_cache=False).logits for row in ROWS], dim=1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_row_equals_separate_rows(name, attention):
    model = load_model(ModelSpec(name, attention=attention))
    packed = model(PACKED, position_ids=POSITIONS, use_cache=False).logits
    torch.testing.assert_close(packed, separate(model), atol=1e-5, rtol=0)
    keep = torch.tensor([2, 6, 7, 20])
    kept = model(PACKED, position_ids=POSITIONS, use_cache=False, logits_to_keep=keep).logits
    torch.testing.assert_close(kept, packed[:, keep], atol=1e-5, rtol=0)
    assert supports_packing(model)
    # What packing must avoid: a mask of ones and a key/value cache both let rows see the rows before.
    for extra in ({"attention_mask": torch.ones_like(PACKED), "use_cache": False}, {"use_cache": True}):
        leaking = model(PACKED, position_ids=POSITIONS, **extra).logits
        assert float((leaking - packed)[:, 7:].abs().max()) > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_packed_gradients_with_adapter_and_checkpointing(name):
    model = attach(load_model(ModelSpec(name, gradient_checkpointing=True)), LoraSettings(rank=2)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    grads = []
    for run in (separate(model), model(PACKED, position_ids=POSITIONS, use_cache=False).logits):
        model.zero_grad()
        run.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert supports_packing(model)
    assert model.training


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_recognised(name, dtype):
    assert supports_packing(load_model(ModelSpec(name, dtype=dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_leaks_is_recognised(dtype):
    class Leaking(torch.nn.Module):
        """A model that ignores the restarts, as one without the block mask would."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, position_ids=None, **kwargs):
            mask = torch.ones_like(kwargs["input_ids"])
            return self.inner(**{**kwargs, "attention_mask": mask, "position_ids": position_ids})

    assert not supports_packing(Leaking(load_model(ModelSpec(NAMES[0], dtype=dtype))))
