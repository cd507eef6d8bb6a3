"""What is served, loaded by PEFT itself: Linear and Conv1D, alpha != r (T1, T8, D02, D03, D05, D07, D08)."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from strategies.aggregation.rules import carry, fedex, fedit, flexlora, flora
from strategies.aggregation.rules.common import Contribution, Factors

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

# PEFT sets fan_in_fan_out for Conv1D by itself and says so.
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")

RANK, ALPHA = 4, 12
LAYERS = {"lin": (10, 6), "conv": (6, 10)}  # (in, out), neither square


@pytest.fixture(scope="module")
def base():
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("lin", torch.nn.Linear(10, 6))
    model.add_module("act", torch.nn.Tanh())
    model.add_module("conv", Conv1D(10, 6))
    model.conv.weight.data.normal_()
    return model


def with_adapter(base, adapters: dict[str, Factors], rank: int, alpha: float):
    """Return base + adapter through PEFT's own config and loader."""
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["lin", "conv"], fan_in_fan_out=False)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    arrays = {
        f"base_model.model.{module}.lora_{k}.weight": torch.tensor(np.asarray(x), dtype=torch.float32)
        for module, f in adapters.items()
        for k, x in (("A", f.a), ("B", f.b))
    }
    result = peft.set_peft_model_state_dict(model, arrays)
    assert not result.unexpected_keys
    return model.eval()


def sites():
    rng = np.random.default_rng(1)
    out = {}
    for module, (inp, width) in LAYERS.items():
        out[module] = [
            Contribution(
                name,
                weight,
                ALPHA / RANK,
                rng.normal(size=(RANK, inp)).astype(np.float32) / 3,
                rng.normal(size=(width, RANK)).astype(np.float32) / 3,
            )
            for name, weight in (("x", 5), ("y", 2), ("z", 1))
        ]
    return out


def ideal_logits(base, x):
    """The oracle folds the dense weighted mean of the products into each layer by hand."""
    model = copy.deepcopy(base)
    for module, cs in sites().items():
        delta = sum(c.weight / 8 * c.scale * c.b.astype(np.float64) @ c.a for c in cs)
        layer = getattr(model, module)
        layer.weight.data += torch.tensor(delta.T if module == "conv" else delta, dtype=torch.float32)
    return model(x)


def served_model(rule, base):
    cs = sites()
    if rule == "flora":
        stacked = {m: flora.aggregate(c) for m, c in cs.items()}
        return with_adapter(base, stacked, 3 * RANK, 3 * RANK)
    if rule == "flexlora":
        target = flexlora.Target(12, ALPHA / 12)
        return with_adapter(
            base, {m: flexlora.aggregate(c, [target])[target].factors for m, c in cs.items()}, 12, ALPHA
        )
    if rule == "carry":
        served = {}
        for module, c in cs.items():
            inp, width = LAYERS[module]
            got = carry.aggregate(c, carry.empty(width, inp))
            adapter = carry.export(got.factors, ALPHA / RANK, got.carry)
            pad = 3 * RANK - len(adapter.a)  # one rank for both layers
            served[module] = Factors(
                np.pad(adapter.a, ((0, pad), (0, 0))), np.pad(adapter.b, ((0, 0), (0, pad)))
            )
        return with_adapter(base, served, 3 * RANK, 3 * RANK)
    if rule == "fedit":
        return with_adapter(base, {m: fedit.aggregate(c) for m, c in cs.items()}, RANK, ALPHA)
    moved, factors = copy.deepcopy(base), {}
    for module, c in cs.items():
        got = fedex.aggregate(c)
        factors[module] = got.factors
        layer = getattr(moved, module)
        layer.weight.data = torch.tensor(
            fedex.fold(layer.weight.detach().numpy(), got.residual, module == "conv")
        )
    return with_adapter(moved, factors, RANK, ALPHA)


@pytest.mark.parametrize("rule", ["flora", "flexlora", "fedex", "carry"])
def test_logits_of_the_served_adapter_are_those_of_the_ideal_t1_t8(rule, base):
    x = torch.randn(7, 10, generator=torch.Generator().manual_seed(2))
    model = served_model(rule, base)
    with torch.no_grad():
        want, got = ideal_logits(base, x), model(x)
        assert (got - want).abs().max() < 1e-5
        assert (want - base(x)).abs().max() > 0.1
        merged = model.merge_and_unload()
        assert (merged(x) - want).abs().max() < 1e-5
        assert merged.lin.weight.dtype == torch.float32


def test_fedit_does_not_reach_the_ideal_logits_control(base):
    x = torch.randn(7, 10, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert (served_model("fedit", base)(x) - ideal_logits(base, x)).abs().max() > 0.05
