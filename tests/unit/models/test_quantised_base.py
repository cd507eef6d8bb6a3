"""H23, D14, QLoRA: a base in 4 or 8 bits beside a float adapter, on the CPU."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

from umbel.config import resolve
from umbel.errors import ConfigError, ModelError
from umbel.models.adapter import adapted_modules, attach, initial_adapter
from umbel.models.export import merge_adapter
from umbel.models.fingerprint import adapter_fingerprint, base_fingerprint
from umbel.models.lora import LoraSettings
from umbel.models.quantised import decode, encode
from umbel.models.source import ModelSpec, load_model, meta_model
from umbel.models.state import read_state, write_state

SETTINGS = LoraSettings(rank=4, target_modules="q_proj,down_proj")
PLAIN = ModelSpec("builtin:tiny-llama")
# Relative error of a Gaussian matrix.
KINDS = {"nf4": (0.085, 0.1), "int8": (0.004, 0.012)}
IDS = (torch.arange(24).reshape(2, 12) * 37 + 11) % 200


def quantised(kind: str) -> ModelSpec:
    pytest.importorskip("bitsandbytes", reason="needs the extra 'quantised'")
    return dataclasses.replace(PLAIN, quantization=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_come_back_within_their_error(kind: str) -> None:
    """D14: NF4 with blocks of 64 has 9.2 % error on a Gaussian matrix."""
    quantised(kind)
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    codes, scale = encode(weight, kind)
    back = decode(codes, scale, kind, (96, 128), torch.float32)
    low, high = KINDS[kind]
    assert low < float((back - weight).norm() / weight.norm()) < high
    assert codes.numel() * codes.element_size() == weight.numel() * (0.5 if kind == "nf4" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_but_the_head_is_coded_and_the_forward_pass_is_that_of_the_codes(
    kind: str,
) -> None:
    model, plain = load_model(quantised(kind)), load_model(PLAIN)
    coded = {n: m for n, m in model.named_modules() if hasattr(m, "dequantised")}
    assert set(coded) == {
        n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n
    }
    for name, layer in coded.items():
        plain.get_submodule(name).weight.data.copy_(layer.dequantised())
    with torch.no_grad():
        got, want = (m(input_ids=IDS, use_cache=False).logits for m in (model, plain))
    assert float((got - want).abs().max()) <= 1e-5
    assert float((got - load_model(PLAIN)(input_ids=IDS, use_cache=False).logits).abs().max()) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_beside_codes_that_do_not_move(kind: str) -> None:
    """H19: every factor B gets a gradient; the same as beside a plain base of the dequantised weights."""
    model, plain = load_model(quantised(kind)), load_model(PLAIN)
    for name, layer in model.named_modules():
        if hasattr(layer, "dequantised"):
            plain.get_submodule(name).weight.data.copy_(layer.dequantised())
    both = [attach(m, SETTINGS) for m in (model, plain)]
    grads = []
    for peft_model in both:
        before = {n: p.detach().clone() for n, p in peft_model.named_parameters() if not p.requires_grad}
        peft_model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append({n: p.grad for n, p in peft_model.named_parameters() if p.requires_grad})
        assert all(torch.equal(p, before[n]) for n, p in peft_model.named_parameters() if n in before)
    assert set(grads[0]) == set(grads[1])
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], atol=1e-6), name
        assert "lora_B" not in name or float(grad.norm()) > 0, name


def test_h21_the_server_needs_no_codes_and_a_differing_kind_is_another_base() -> None:
    """The adapter's fingerprint is that of the plain base; the base's differs by kind."""
    site, server = attach(load_model(quantised("nf4")), SETTINGS), attach(meta_model(PLAIN), SETTINGS)
    prints = [adapter_fingerprint(SETTINGS, adapted_modules(m)) for m in (site, server)]
    assert prints[0] == prints[1]
    bases = {
        base_fingerprint(dataclasses.replace(PLAIN, quantization=kind)) for kind in ("none", "nf4", "int8")
    }
    assert len(bases) == 3


def test_h23_the_merge_goes_into_the_full_precision_base_and_says_so(tmp_path, caplog) -> None:
    """Merged weights equal W + s B A to 1e-6, W being the unquantised one."""
    from transformers import AutoModelForCausalLM

    spec = quantised("nf4")
    modules = adapted_modules(attach(meta_model(PLAIN), SETTINGS))
    draw = np.random.default_rng(3)
    arrays = {
        n: (0.02 * draw.standard_normal(a.shape)).astype(np.float32)
        for n, a in initial_adapter(modules, SETTINGS, 0).items()
    }
    with caplog.at_level(logging.WARNING, logger="umbel.models"):
        merge_adapter(spec, arrays, SETTINGS, tmp_path / "merged", card="")
    assert "full-precision base" in caplog.text
    assert "nf4" in caplog.text
    merged, base = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), load_model(PLAIN)
    for m in modules:
        want = base.get_submodule(m.name).weight.detach().numpy() + m.scale * (
            arrays[f"{m.name}.lora_B.weight"] @ arrays[f"{m.name}.lora_A.weight"]
        )
        assert np.abs(merged.get_submodule(m.name).weight.detach().numpy() - want).max() <= 1e-6


def test_h23_full_training_of_codes_is_refused() -> None:
    """Packed codes are never averaged: the configuration is refused, and so is reading them as a state."""
    with pytest.raises(ConfigError, match=r"model\.quantization"):
        resolve(None, ["model.quantization=nf4", "train.mode=full"])
    with pytest.raises(ModelError):
        read_state(load_model(quantised("nf4")), "full")


def test_adapters_read_and_write_as_beside_a_plain_base() -> None:
    model = attach(load_model(quantised("int8")), SETTINGS)
    state = {n: a + 0.5 for n, a in read_state(model, "lora").items()}
    write_state(model, state, "lora")
    assert all(np.array_equal(a, state[n]) for n, a in read_state(model, "lora").items())


def test_without_the_package_the_setting_is_refused_in_words(monkeypatch) -> None:
    monkeypatch.setattr("umbel.models.quantised.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="bitsandbytes"):
        load_model(dataclasses.replace(PLAIN, quantization="nf4"))


def test_d14_rules_that_touch_the_base_are_refused_and_the_others_are_not() -> None:
    """T10: fedsb starts from the base's gradient; every other method leaves the base alone."""
    from server_app.start import prepare
    from strategies import build
    from umbel.config.schema import METHODS

    start = prepare(resolve(None, ["lora.target-modules=q_proj"]))
    refused = []
    for method in METHODS:
        try:
            config = resolve(None, [f"run.method={method}", "model.quantization=nf4"])
            build(config, start.layout, start.scales)
        except ConfigError as error:
            if "quantization" in str(error) or "quantised" in str(error):
                refused.append(method)
    assert refused == ["fedsb"]


def test_a_federation_of_adapters_beside_a_4_bit_base(tmp_path) -> None:
    """Carry over the real server and sites: two rounds, exact, and the adapter is trained."""
    pytest.importorskip("bitsandbytes", reason="needs the extra 'quantised'")
    from support.inprocess import commits, make_session
    from support.rules import SETTINGS as RULES

    session = make_session(
        tmp_path, *RULES, "run.method=carry", "model.quantization=nf4", sites=("clinic", "kitchen")
    )
    assert session.run() == 0, session.history.reason
    records = commits(tmp_path)
    assert [len(r["accepted"]) for r in records] == [2, 2]
    assert all(r["exactness"]["relative_error"] <= 1e-6 for r in records)
