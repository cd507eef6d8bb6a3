"""How long packed sequences are: nothing lost, nothing split, and no more attention than the rows need on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_app.batches import NARROW_TOKENS, PADDING, batches, sequences
from umbel.data.encode import Encoded


def row(length: int) -> Encoded:
    ids = np.arange(length, dtype=np.int32)
    return Encoded(ids, ids.copy())


def test_equal_rows_are_not_joined_where_attention_would_pay_for_it() -> None:
    found = sequences([row(300)] * 8, max_tokens=2048, packing=True)
    assert [len(s.input_ids) for s in found] == [300] * 8
    assert [
        len(s.input_ids) for s in sequences([row(300)] * 8, max_tokens=2048, packing=True, wide=True)
    ] == [1800, 600]


def test_short_rows_share_a_sequence_and_never_exceed_what_the_run_allows() -> None:
    assert [len(s.input_ids) for s in sequences([row(32)] * 16, max_tokens=2048, packing=True)] == [256, 256]
    assert [len(s.input_ids) for s in sequences([row(32)] * 16, max_tokens=64, packing=True)] == [64] * 8


@given(st.lists(st.integers(2, 400), min_size=1, max_size=20), st.booleans())
def test_every_supervised_token_is_kept(lengths, wide) -> None:
    found = sequences([row(n) for n in lengths], max_tokens=512, packing=True, wide=wide)
    assert sum(len(s.targets) for s in found) == sum(n - 1 for n in lengths)
    bound = 512 if wide else max(NARROW_TOKENS, *lengths)
    assert all(len(s.input_ids) <= bound for s in found)


@given(st.lists(st.integers(2, 400), min_size=1, max_size=20), st.booleans())
def test_every_sequence_is_in_one_batch_with_little_padding(lengths, packing) -> None:
    found = sequences([row(n) for n in lengths], max_tokens=512, packing=packing)
    made = batches(found, max_tokens=512)
    assert sum(len(b.targets) for b in made) == sum(n - 1 for n in lengths)
    real = {
        id(b): sum(len(s.input_ids) for s in found if s.joined == (b.position_ids is not None)) for b in made
    }
    for b in made:
        assert b.input_ids.size <= 512
        assert len(b.input_ids) == 1 or b.input_ids.size <= real[id(b)] / (1 - PADDING)
        assert (b.input_ids[b.rows, b.keep + 1] == b.targets).all()


@pytest.mark.parametrize("name", ["builtin:tiny-llama", "builtin:tiny-gpt2"])
@pytest.mark.parametrize("packing", [True, False])
def test_batches_give_the_loss_and_gradient_of_the_rows_one_by_one(name, packing) -> None:
    """Padding, joined rows and positions picked before the output layer change nothing but the order of sums."""
    import torch

    from client_app.workbench import load_site_model
    from umbel.config import resolve
    from umbel.models.loss import batch_loss
    from umbel.models.state import trainable_parameters

    model = load_site_model(resolve(None, [f"model.name={name}"])).model
    parameters = trainable_parameters(model, "lora")
    for p in parameters:
        torch.nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(p.numel()))
    rng = np.random.default_rng(3)
    rows = [
        Encoded(ids, ids.copy())
        for n in (40, 38, 37, 12, 9, 40)
        for ids in [rng.integers(0, 200, n, np.int32)]
    ]

    def run(groups: list) -> tuple[float, list]:
        model.zero_grad()
        total = sum(batch_loss(model, *g).loss for g in groups)
        total.backward()
        return float(total.detach()), [p.grad.clone() for p in parameters]

    one_by_one = [
        b for r in rows for b in batches(sequences([r], max_tokens=80, packing=False), max_tokens=80)
    ]
    together = batches(sequences(rows, max_tokens=80, packing=packing), max_tokens=160)
    assert len(together) < len(one_by_one)
    assert any(len(b.input_ids) > 1 for b in together)
    (loss, grads), (want, expected) = run(together), run(one_by_one)
    assert abs(loss - want) <= 1e-6 * want
    for got, right in zip(grads, expected, strict=True):
        assert torch.allclose(got, right, rtol=1e-4, atol=1e-6 * float(right.abs().max() + 1))
