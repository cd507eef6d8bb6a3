"""A part of a model holds its own tensors and no other, read from shards, and computes what the whole computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from umbel.errors import ModelError
from umbel.models.adapter import attach
from umbel.models.builtin import builtin_model
from umbel.models.lora import LoraSettings
from umbel.models.part_loading import Reader, load_parts
from umbel.models.parts import Part, block_of, names_of, plan_cut
from umbel.models.source import ModelSpec, load_model

PARTS = ("head", "body", "tail")


@pytest.fixture(scope="module", params=["llama-gqa", "llama-tied", "gpt2", "qwen2"])
def checkpoint(request, tmp_path_factory) -> Path:
    from transformers import AutoModelForCausalLM
    from transformers.models.gpt2 import GPT2Config
    from transformers.models.llama import LlamaConfig
    from transformers.models.qwen2 import Qwen2Config

    common = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    llama = {**common, "intermediate_size": 48, "num_key_value_heads": 2}
    config = {
        "llama-gqa": lambda: LlamaConfig(**llama, tie_word_embeddings=False),
        "llama-tied": lambda: LlamaConfig(**llama, tie_word_embeddings=True),
        "gpt2": lambda: GPT2Config(
            vocab_size=97,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=64,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        ),
        "qwen2": lambda: Qwen2Config(**llama, tie_word_embeddings=True),
    }[request.param]()
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="20KB")
    return folder


def settings(folder: Path) -> LoraSettings:
    gpt2 = (folder / "config.json").read_text().find("gpt2") > 0
    return LoraSettings(rank=2, alpha=4.0, target_modules="c_attn" if gpt2 else "q_proj,v_proj")


def whole(folder: Path):
    spec = ModelSpec(str(folder))
    model = attach(load_model(spec), settings(folder))
    model.eval()
    return spec, model


@pytest.mark.parametrize(("head", "tail"), [(1, 1), (2, 0), (1, 2), (3, 1)])
def test_parts_in_a_row_are_the_whole_model_h15(checkpoint, head, tail) -> None:
    spec, model = whole(checkpoint)
    cut = plan_cut(model.config, head, tail)
    names = PARTS if tail else PARTS[:2]
    parts = load_parts(spec, settings(checkpoint), cut, names)
    calls: list[str] = []
    value = ids = torch.arange(2 * 7).reshape(2, 7) % 97
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        for name in names:
            inner = parts[name].inner
            blocks = inner.layers if hasattr(inner, "layers") else inner.h
            for block in blocks:
                block.register_forward_hook(lambda *_: calls.append("block"))
            value = parts[name](value)
        got = parts[names[-1]].output(value)
    assert torch.equal(got, want)
    assert len(calls) == 4


def test_only_the_needed_tensors_are_read_and_each_is_the_checkpoints_s5(checkpoint) -> None:
    spec, model = whole(checkpoint)
    known = dict(plain_names(model))
    shards = len(list(checkpoint.glob("*.safetensors")))
    cut = plan_cut(model.config, 1, 1)
    for name in PARTS:
        meta = Recorded(checkpoint, spec)
        part = meta.load(cut, name)
        held = {id(p) for root in meta.roots(part) for p in root.parameters()}
        assert all(not p.is_meta for root in meta.roots(part) for p in root.parameters())
        assert all(not b.is_meta for root in meta.roots(part) for b in root.buffers())
        assert 0 < len(meta.reader.opened) < shards
        found = 0
        for full, parameter in plain_names(meta.model):
            if id(parameter) in held and ".lora_" not in full:
                assert torch.equal(parameter, known[full]), full
                found += 1
        assert found > 0


def plain_names(model) -> list:
    """Return (name without adapter, parameter) of the base model, tied ones under each of their names."""
    named = model.get_base_model().named_parameters(remove_duplicate=False)
    return [(name.replace(".base_layer.", "."), parameter) for name, parameter in named]


class Recorded:
    """One part with the reader that filled it."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        from umbel.models.source import meta_model

        self.model = attach(meta_model(spec), settings(folder))
        self.reader = Reader(folder, self.model)

    def load(self, cut, name) -> Part:
        part = Part(self.model, cut, name)
        for root in self.roots(part):
            self.reader.fill(root, "cpu")
        part.refresh(self.model, cut)
        return part

    @staticmethod
    def roots(part: Part) -> list:
        return [part.inner, *([part.output] if part.output is not None else [])]


def test_a_missing_tensor_is_named(checkpoint, tmp_path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    index = copy / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("0.mlp", "9.mlp"))
    spec = ModelSpec(str(copy))
    _, model = whole(checkpoint)
    with pytest.raises(ModelError, match=r"no tensor .*0\.mlp"):
        load_parts(spec, settings(copy), plan_cut(model.config, 1, 1), ("head",))


def test_adapters_keep_their_whole_model_names() -> None:
    model = attach(builtin_model("tiny-llama-4", attention="sdpa"), LoraSettings(rank=2, alpha=4.0))
    cut = plan_cut(model.config, 1, 2)
    parts = {name: Part(model, cut, name) for name in PARTS}
    names = [n for part in parts.values() for n in part.parameters]
    assert len(names) == len(set(names))
    assert {block_of(n) for n in parts["head"].parameters} == {0}
    assert {block_of(n) for n in parts["body"].parameters} == {1}
    assert {block_of(n) for n in parts["tail"].parameters} == {2, 3}
    assert names_of(names, cut, "body") == list(parts["body"].parameters)


@pytest.mark.parametrize(("head", "tail"), [(0, 1), (3, 2), (1, -1)])
def test_a_cut_that_is_none_is_refused(head, tail) -> None:
    with pytest.raises(ModelError, match="do not fit a model of 4 blocks"):
        plan_cut(builtin_model("tiny-llama-4", attention="sdpa").config, head, tail)


def test_nothing_of_the_whole_models_state_changes_when_it_is_cut() -> None:
    model = attach(builtin_model("tiny-llama-4", attention="sdpa"), LoraSettings(rank=2, alpha=4.0))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits.numpy().copy()
        for name in PARTS:
            Part(model, plan_cut(model.config, 1, 1), name)
        np.testing.assert_array_equal(model(input_ids=ids, use_cache=False).logits.numpy(), before)
