"""Supervised fine-tuning on tiny models: gradients, data order, deadlines and refusals, with exact oracles."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from client_app.clock import Clock
from client_app.tasks import sft
from client_app.tasks.evaluate import evaluate
from client_app.workbench import load_site_model
from umbel.config import resolve
from umbel.data.cursor import Cursor
from umbel.data.encode import Encoded
from umbel.errors import Refusal, RefusalKind
from umbel.models.loss import row_loss
from umbel.models.state import read_state, trainable_parameters, write_state

FOREVER = Clock(1e9)


def row(length: int, supervised: int, seed: int) -> Encoded:
    ids = np.random.default_rng(seed).integers(4, 250, size=length).astype(np.int32)
    labels = np.full(length, -100, np.int32)
    labels[-supervised:] = ids[-supervised:]
    return Encoded(ids, labels)


@pytest.fixture(scope="module", params=["builtin:tiny-llama", "builtin:tiny-gpt2"])
def loaded(request):
    return load_site_model(resolve(None, [f"model.name={request.param}", "train.threads=1"]))


@pytest.fixture(scope="module")
def start(loaded):
    arrays = read_state(loaded.model, "lora")
    rng = np.random.default_rng(0)
    return {n: (a + 0.02 * rng.normal(size=a.shape)).astype(np.float32) for n, a in arrays.items()}


def gradients(model, rows, config, *, packing=True):
    """Return the gradient that one optimiser step would use, without the step."""
    parameters = trainable_parameters(model, "lora")
    seen = {}

    class Keep:
        def zero_grad(self, set_to_none=True):
            for p in parameters:
                p.grad = None

        def step(self):
            seen.update({i: p.grad.clone() for i, p in enumerate(parameters)})

    sft.one_step(
        model, rows, Keep(), parameters, config, precision="float32", max_tokens=2048, packing=packing
    )
    return seen


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_h01_accumulated_gradient_is_the_big_batch_gradient(loaded, start, size, packing) -> None:
    """H01: rows of very different token counts, whole and incomplete last micro-batches."""
    write_state(loaded.model, start, "lora")
    rows = [row(20, 4, 1), row(9, 1, 2), row(30, 17, 3), row(12, 2, 4), row(7, 3, 5)]
    clip = "train.clip-norm=0"
    whole = gradients(loaded.model, rows, resolve(None, ["train.batch-size=5", clip]), packing=False)
    parts = gradients(
        loaded.model,
        rows,
        resolve(None, [f"train.batch-size={size}", "train.accumulation=5", clip]),
        packing=packing,
    )
    for i, gradient in whole.items():
        assert torch.allclose(gradient, parts[i], atol=1e-6, rtol=1e-5)


def test_h01_the_mean_is_over_tokens_not_over_batches() -> None:
    """H01: token losses [4] and [1, 1, 1] give 7/4, not 2.5."""
    sums = [(4.0, 1), (3.0, 3)]
    assert sum(s for s, _ in sums) / sum(n for _, n in sums) == 1.75


def test_h02_loss_is_shifted_once_and_only_at_supervised_positions(loaded, start) -> None:
    """H02: equal to cross entropy of logits[:, :-1] against ids[:, 1:]."""
    write_state(loaded.model, start, "lora")
    ids = row(16, 15, 9).input_ids
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor(ids[None].astype(np.int64))).logits
        want = F.cross_entropy(logits[0, :-1], torch.tensor(ids[1:].astype(np.int64)), reduction="sum")
        got = row_loss(loaded.model, ids, np.arange(16), np.arange(15), ids[1:])
    assert got.tokens == 15
    assert float(got.loss) == pytest.approx(float(want), abs=1e-4)


def run(
    loaded, start, rows, *, clock=FOREVER, steps=3, cursor=None, moments=None, overrides=(), round_index=1
):
    write_state(loaded.model, start, "lora")
    config = resolve(
        None, ["train.learning-rate=0.01", "train.batch-size=2", "train.schedule=constant", *overrides]
    )
    return sft.train(
        loaded.model,
        rows,
        config,
        clock,
        site="a",
        round_index=round_index,
        first_step=0,
        total_steps=10,
        cursor=cursor or Cursor(0, 0),
        moments=moments or {},
        precision="float32",
        max_tokens=2048,
        packing=True,
        local_steps=steps,
    )


ROWS = [row(10 + i, 3 + i % 4, 20 + i) for i in range(7)]


def test_training_moves_every_adapter_and_says_what_it_did(loaded, start) -> None:
    """H19: no adapter stays where it was."""
    result = run(loaded, start, ROWS)
    assert (result.steps, result.partial, result.cursor) == (3, False, Cursor(0, 6))
    assert result.tokens == sum(ROWS[i].num_supervised for i in order(7)[:6])
    assert all(np.abs(result.arrays[n] - start[n]).max() > 0 for n in start)


def order(n: int) -> list[int]:
    from umbel.data.cursor import take

    return take(Cursor(0, 0), n, n, seed=42, site="a")[0].tolist()


def test_same_seed_same_bits_whatever_ran_before(loaded, start) -> None:
    first = run(loaded, start, ROWS, overrides=["lora.dropout=0.0"])
    torch.manual_seed(999)
    torch.rand(1000)
    second = run(loaded, start, ROWS)
    assert all(np.array_equal(first.arrays[n], second.arrays[n]) for n in start)


def test_h04_fewer_rows_than_a_batch_still_give_steps(loaded, start) -> None:
    """H04: three rows, batch of four."""
    result = run(loaded, start, ROWS[:3], steps=1, overrides=["train.batch-size=4"])
    assert result.steps == 1
    assert result.cursor == Cursor(1, 1)


def test_deadline_gives_a_partial_result_with_its_tokens(loaded, start) -> None:
    """H37: stops between two steps; nothing done at all is a refusal."""
    ticks = itertools.count()
    result = run(loaded, start, ROWS, clock=Clock(3.0, now=lambda: float(next(ticks))), steps=50)
    assert result.partial
    assert 1 <= result.steps <= 3
    with pytest.raises(Refusal) as caught:
        run(loaded, start, ROWS, clock=Clock(0.0))
    assert caught.value.kind is RefusalKind.DEADLINE


def test_f31_a_loss_that_is_not_finite_is_a_typed_refusal(loaded, start) -> None:
    """F31: nothing of that round is sent."""
    broken = {n: a.copy() for n, a in start.items()}
    first = next(iter(broken))
    broken[first].reshape(-1)[0] = np.inf
    with pytest.raises(Refusal) as caught:
        run(loaded, broken, ROWS)
    assert caught.value.kind is RefusalKind.NON_FINITE


def test_kept_moments_continue_exactly(loaded, start) -> None:
    """Two rounds of two steps with kept moments equal one round of four."""
    keep = ["train.optimizer-state=keep"]
    whole = run(loaded, start, ROWS, steps=4, overrides=keep)
    first = run(loaded, start, ROWS, steps=2, overrides=keep)
    second = run(
        loaded, first.arrays, ROWS, steps=2, cursor=first.cursor, moments=first.moments, overrides=keep
    )
    assert all(np.array_equal(whole.arrays[n], second.arrays[n]) for n in start)
    assert whole.cursor == second.cursor


def test_dropout_depends_on_round_and_site_not_on_history() -> None:
    loaded = load_site_model(resolve(None, ["lora.dropout=0.5"]))
    begin = read_state(loaded.model, "lora")
    one = run(loaded, begin, ROWS, overrides=["lora.dropout=0.5"])
    same = run(loaded, begin, ROWS, overrides=["lora.dropout=0.5"])
    other = run(loaded, begin, ROWS, overrides=["lora.dropout=0.5"], round_index=2)
    assert all(np.array_equal(one.arrays[n], same.arrays[n]) for n in begin)
    assert any(not np.array_equal(one.arrays[n], other.arrays[n]) for n in begin)


def test_evaluation_is_a_sum_and_independent_of_batching(loaded, start) -> None:
    write_state(loaded.model, start, "lora")
    got = [
        evaluate(loaded.model, ROWS, FOREVER, batch_size=b, max_tokens=2048, packing=p, precision="float32")
        for b, p in ((1, False), (3, True), (7, True))
    ]
    assert {g.tokens for g in got} == {sum(r.num_supervised for r in ROWS)}
    assert [g.loss_sum for g in got] == pytest.approx([got[0].loss_sum] * 3, rel=1e-5)
    assert (
        evaluate(
            loaded.model, ROWS, Clock(0.0), batch_size=2, max_tokens=2048, packing=True, precision="float32"
        )
        is None
    )
