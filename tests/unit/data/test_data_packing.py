"""Packing, padding and the single shift, against a real model (H02)."""

from __future__ import annotations

import numpy as np
import pytest

from umbel.data import IGNORE, Encoded, pack_rows, pad_rows, supervised_positions
from umbel.errors import ConfigError


def encoded(ids, num_prompt=0):
    labels = np.array(ids, np.int32)
    labels[:num_prompt] = IGNORE
    return Encoded(np.array(ids, np.int32), labels)


def test_first_fit_decreasing_by_hand():
    rows = [
        encoded([10] * 4),
        encoded([20] * 6, 1),
        encoded([30] * 3, 2),
        encoded([40] * 5),
        encoded([50] * 2),
    ]
    packed = pack_rows(rows, 10)
    assert [row.input_ids.tolist() for row in packed] == [[20] * 6 + [10] * 4, [40] * 5 + [30] * 3 + [50] * 2]
    assert packed[0].position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert packed[0].labels.tolist() == [IGNORE, 20, 20, 20, 20, 20, IGNORE, 10, 10, 10]
    assert [row.num_supervised for row in packed] == [8, 4 + 1 + 1]
    assert packed[0].input_ids.dtype == packed[0].labels.dtype == packed[0].position_ids.dtype == np.int32


def test_h02_positions_predict_the_next_token_of_the_same_segment():
    (packed,) = pack_rows([encoded([1, 2, 3, 4], 2), encoded([5, 6, 7])], 16)
    keep, targets = supervised_positions(packed)
    assert keep.tolist() == [1, 2, 4, 5]
    assert targets.tolist() == [3, 4, 6, 7]
    keep, targets = supervised_positions(encoded([1, 2, 3], 2))
    assert (keep.tolist(), targets.tolist()) == ([1], [3])


def test_packing_changes_nothing_in_the_data_it_was_given():
    row = encoded([1, 2, 3])
    pack_rows([row], 8)
    assert row.labels.tolist() == [1, 2, 3]


def test_empty_input_and_a_row_that_is_too_long():
    assert pack_rows([], 8) == []
    assert pad_rows([]).input_ids.shape == (0, 0)
    with pytest.raises(ConfigError, match=r"max_tokens is smaller than a row to pack, got 2\. Allowed: >= 3"):
        pack_rows([encoded([1, 2, 3])], 2)


def test_padding_rounds_up_the_width():
    batch = pad_rows([encoded([1, 2, 3], 1), encoded([4])], pad_id=9, multiple_of=4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch.num_supervised == 2


def test_h02_packed_padded_and_separate_losses_agree_on_a_real_model():
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    rows = [encoded(rng.integers(3, 50, size).tolist(), prompt) for size, prompt in ((9, 4), (7, 2), (5, 1))]

    def packed_loss(packed):
        keep, targets = supervised_positions(packed)
        logits = model(
            input_ids=torch.from_numpy(packed.input_ids[None]).long(),
            position_ids=torch.from_numpy(packed.position_ids[None]).long(),
            logits_to_keep=torch.from_numpy(keep),
            use_cache=False,
        ).logits[0]
        return float(cross_entropy(logits, torch.from_numpy(targets), reduction="sum"))

    with torch.no_grad():
        separate = sum(
            float(model(input_ids=ids, labels=torch.from_numpy(row.labels[None]).long()).loss)
            * row.num_supervised
            for row in rows
            for ids in [torch.from_numpy(row.input_ids[None]).long()]
        )
        (packed,) = pack_rows(rows, 32)
        batch = pad_rows(rows, pad_id=3)
        padded = model(
            input_ids=torch.from_numpy(batch.input_ids),
            attention_mask=torch.from_numpy(batch.attention_mask),
            labels=torch.from_numpy(batch.labels),
        ).loss
        assert packed.num_supervised == batch.num_supervised == 5 + 5 + 4
        assert packed_loss(packed) == pytest.approx(separate, rel=1e-5)
        assert float(padded) * batch.num_supervised == pytest.approx(separate, rel=1e-5)
        full = encoded(rng.integers(3, 50, 8).tolist())
        logits = model(input_ids=torch.from_numpy(full.input_ids[None]).long()).logits
        by_hand = cross_entropy(logits[0, :-1], torch.from_numpy(full.input_ids[1:]).long(), reduction="sum")
        assert packed_loss(pack_rows([full], 8)[0]) == pytest.approx(float(by_hand), abs=1e-5)
