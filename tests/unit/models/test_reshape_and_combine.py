"""A model shaped for one round: ranks, cores and side adapters come and go, and nothing of them stays."""

from __future__ import annotations

import numpy as np
import pytest

from umbel.exchange import CARRY_A, CARRY_B, CORE, A, B, Exchange, Form, flatten, unflatten
from umbel.models.adapter import adapted_modules, attach, initial_adapter
from umbel.models.combine import one_adapter
from umbel.models.lora import LoraSettings
from umbel.models.reshape import load_adapter, set_carry, set_cores, set_rank
from umbel.models.source import ModelSpec, load_model
from umbel.models.state import named_trainable, read_state, write_state

SETTINGS = LoraSettings(rank=4, alpha=12, target_modules="q_proj,down_proj")


@pytest.fixture(scope="module")
def model():
    return attach(load_model(ModelSpec("builtin:tiny-llama")), SETTINGS)


def logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12)[None] * 5, use_cache=False).logits.double().numpy()


def factors(model, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        n: rng.normal(size=a.shape).astype(a.dtype) * np.float32(0.1)
        for n, a in read_state(model, "lora").items()
    }


def side(model, rank: int) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(5), {}
    for m in adapted_modules(model):
        found[m.name + CARRY_A] = rng.normal(size=(rank, m.in_features)).astype(np.float32) * np.float32(0.1)
        found[m.name + CARRY_B] = rng.normal(size=(m.out_features, rank)).astype(np.float32) * np.float32(0.1)
    return found


def test_rank_and_scale_follow_the_round_and_come_back(model) -> None:
    """D07: one function for s; alpha stays, so half the rank has twice the scale."""
    before = factors(model)
    write_state(model, before, "lora")
    want = logits(model)
    set_rank(model, SETTINGS, 2)
    assert {(m.rank, m.scale) for m in adapted_modules(model)} == {(2, 6.0)}
    set_rank(model, SETTINGS)
    assert {(m.rank, m.scale) for m in adapted_modules(model)} == {(4, 3.0)}
    write_state(model, before, "lora")
    assert np.array_equal(logits(model), want)


def test_a_side_adapter_adds_its_product_and_leaves_with_it(model) -> None:
    """s B A + C as the forward pass sees it equals one stacked adapter; without C the bits are those of before."""
    import dataclasses

    state = factors(model)
    write_state(model, state, "lora")
    bare = logits(model)
    whole = {**state, **side(model, 3)}
    load_adapter(model, whole, SETTINGS)
    both = logits(model)
    assert np.abs(both - bare).max() > 1e-3
    arrays, settings = one_adapter(whole, SETTINGS)
    assert (settings.rank, settings.alpha) == (7, 7.0)
    assert dataclasses.replace(settings, rank=4, alpha=12.0) == SETTINGS
    plain = attach(load_model(ModelSpec("builtin:tiny-llama")), settings)
    write_state(plain, arrays, "lora")
    assert np.abs(logits(plain) - both).max() <= 1e-5
    set_carry(model, {})
    assert np.array_equal(logits(model), bare)


def test_the_side_adapter_is_off_with_the_adapter(model) -> None:
    """A reference model is the base: `disable_adapter` must take C away too."""
    load_adapter(model, {**factors(model), **side(model, 2)}, SETTINGS)
    with model.disable_adapter():
        off = logits(model)
    assert np.array_equal(off, logits(load_model(ModelSpec("builtin:tiny-llama"))))
    set_carry(model, {})


@pytest.mark.parametrize("heads", [1, 2])
def test_cores_are_block_diagonal_and_only_they_train(model, heads: int) -> None:
    """s B blockdiag(M_h) A against a plain adapter whose B is B M; back to plain the bits are B's."""
    state = factors(model)
    rng, size = np.random.default_rng(1), 4 // heads
    modules = [m.name for m in adapted_modules(model)]
    cores = {m + CORE: rng.normal(size=(heads, size, size)).astype(np.float32) for m in modules}
    load_adapter(model, {**state, **cores}, SETTINGS)
    got = logits(model)
    trained = named_trainable(model, "lora", "core")
    ends = {name.rsplit(".", 1)[-1] for name in trained}
    assert ends == ({"core", "gain"} if heads > 1 else {"core"})
    assert [
        n for n, p in model.named_parameters() if p.requires_grad and "core" not in n and "gain" not in n
    ] == []
    arrays, settings = one_adapter({**state, **cores}, SETTINGS)
    assert settings == SETTINGS
    load_adapter(model, arrays, SETTINGS)
    assert np.abs(logits(model) - got).max() <= 1e-5
    load_adapter(model, state, SETTINGS)
    assert all(np.array_equal(a, state[n]) for n, a in read_state(model, "lora").items())
    set_cores(model, 0)


def test_a_form_names_shapes_and_takes_no_memory(model) -> None:
    modules = adapted_modules(model)
    form = Form("B", rank=2, carry=10**6, cores=2)
    found = form.tensors(modules, np.dtype(np.float32))
    m = modules[0]
    assert {n.removeprefix(m.name): a.shape for n, a in found.items() if n.startswith(m.name)} == {
        B: (m.out_features, 2),
        CARRY_A: (min(m.in_features, m.out_features), m.in_features),
        CARRY_B: (m.out_features, min(m.in_features, m.out_features)),
        CORE: (2, 1, 1),
    }
    assert {a.strides for a in found.values()} <= {(0, 0), (0, 0, 0)}


def test_segments_put_the_adapter_together_again(model) -> None:
    modules, state = adapted_modules(model), factors(model)
    parts = [Form(part=(i, 3)).pick(state, modules)["segment"] for i in range(3)]
    whole = np.concatenate(parts)
    assert np.array_equal(whole, flatten(state))
    assert max(len(p) for p in parts) - min(len(p) for p in parts) <= 1
    assert all(np.array_equal(a, state[n]) for n, a in unflatten(whole, state).items())


def test_an_exchange_travels_as_the_little_that_is_not_the_default() -> None:
    import json

    assert Exchange().to_dict() == {}
    made = Exchange(Form("B"), Form(part=(1, 2)), trains="B", seeded="A", frozen_crc="x")
    assert Exchange.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    with pytest.raises(TypeError, match="unheard"):
        Exchange.from_dict({"unheard": 1})


def test_seeded_factors_are_those_of_the_server(model) -> None:
    from umbel.models.seeded import seeded_factors

    modules = adapted_modules(model)
    want = initial_adapter(modules, SETTINGS, 11)
    ffa = seeded_factors(modules, SETTINGS, 11, Exchange(Form("B"), Form("B"), seeded="A"))
    assert set(ffa) == {n for n in want if n.endswith(A)}
    assert all(np.array_equal(a, want[n]) for n, a in ffa.items())
    heads = seeded_factors(modules, SETTINGS, 11, Exchange(Form("", cores=2), Form("", cores=2), seeded="AB"))
    name = modules[0].name
    assert heads[name + A].std() == pytest.approx(1 / np.sqrt(modules[0].in_features), rel=0.2)
    assert heads[name + B].std() == pytest.approx(1 / np.sqrt(modules[0].out_features), rel=0.2)
