"""Models by configuration alone: H09's exact sizes on the meta device, tied weights once, buffers at home."""

from __future__ import annotations

import numpy as np
import pytest

from umbel.config import resolve
from umbel.errors import ConfigError, ModelError
from umbel.models.described import described
from umbel.models.fingerprint import base_fingerprint
from umbel.models.source import ModelSpec, drawn_model, load_model, load_tokenizer, meta_model
from umbel.models.state import read_state, state_tensors


@pytest.mark.parametrize(
    ("name", "parameters", "num_bytes"),
    [
        ("config:gpt2", 124_439_808, 497_759_232),
        ("config:gpt2-medium", 354_823_168, 1_419_292_672),
        ("config:llama-3.2-1b", 1_235_814_400, 4_943_257_600),
    ],
)
def test_h09_a_full_exchange_counts_the_tied_matrix_once(name, parameters, num_bytes) -> None:
    tensors = state_tensors(meta_model(ModelSpec(name)), "full")
    assert sum(t.numel() for t in tensors.values()) == parameters
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == num_bytes
    assert not any("lm_head" in key or "inv_freq" in key or "rotary" in key for key in tensors)


def test_drawn_weights_are_a_function_of_the_seed_and_leave_the_callers_random_state() -> None:
    import torch

    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (read_state(drawn_model(ModelSpec("config:llama-tiny"), s), "full") for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in one.items():
        np.testing.assert_array_equal(value, two[key])
    assert any((value != other[key]).any() for key, value in one.items())


def test_rope_tables_are_computed_at_the_site_and_never_rounded() -> None:
    import torch

    model = load_model(ModelSpec("config:llama-tiny", dtype="bfloat16"))
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert "inv_freq" not in " ".join(state_tensors(model, "full"))


def test_a_directory_with_a_config_alone_is_a_scratch_model_of_pretraining_only(tmp_path) -> None:
    from umbel.models.shapes import shape_config

    shape_config("gpt2-tiny").save_pretrained(tmp_path)
    full = [f"model.name={tmp_path}", "train.mode=full"]
    spec = described(resolve(None, [*full, "run.task=pretrain"]))[0]
    assert not spec.has_weights
    assert len(load_tokenizer(spec)) == 259
    assert sum(p.numel() for p in load_model(spec).parameters()) == 133_056
    assert base_fingerprint(spec) != base_fingerprint(ModelSpec("config:llama-tiny"))
    with pytest.raises(ModelError, match="no safetensors weights"):
        load_model(described(resolve(None, full))[0])
    # Continued from a checkpoint: the very weights of the directory.
    drawn_model(spec, 9).save_pretrained(tmp_path)
    assert spec.has_weights
    np.testing.assert_array_equal(
        read_state(load_model(spec), "full")["transformer.wte.weight"],
        read_state(drawn_model(ModelSpec("config:gpt2-tiny"), 9), "full")["transformer.wte.weight"],
    )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["run.task=pretrain"], "train.mode"),
        (["model.name=config:gpt2"], "model.name"),
        (["train.optimizer=muon"], "train.optimizer"),
        (["data.leases=server"], "data.leases"),
        (["run.task=pretrain", "train.mode=full", "model.dtype=bfloat16"], "model.dtype"),
        (
            ["run.task=pretrain", "train.mode=full", "data.leases=server", "clients.late=weight"],
            "clients.late",
        ),
        (
            [
                "run.task=pretrain",
                "train.mode=full",
                "train.optimizer=adamw8bit",
                "train.optimizer-state=keep",
            ],
            "train.optimizer-state",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_by_its_key(settings, key) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, settings)
    assert caught.value.key == key


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match="config:gpt2-medium"):
        load_model(ModelSpec("config:gpt5"))
