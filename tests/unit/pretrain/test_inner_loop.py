"""The inner loop of pretraining on a two-layer GPT-2 over bytes: exact steps, kept moments, limits."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from client_app.clock import Clock
from client_app.inner import hidden_matrices
from client_app.tasks.pretrain import Work, pretrain
from umbel.config import resolve
from umbel.data.cursor import Cursor
from umbel.data.tokens import Blocks, Corpus
from umbel.errors import Refusal
from umbel.models.block_loss import block_loss, score_blocks
from umbel.models.source import ModelSpec, drawn_model
from umbel.models.state import named_trainable, read_state

SETTINGS = (
    "run.task=pretrain",
    "train.mode=full",
    "model.name=config:gpt2-tiny",
    "data.max-length=16",
    "train.batch-size=2",
    "train.accumulation=2",
    "train.learning-rate=0.01",
    "train.schedule=constant",
    "train.weight-decay=0.1",
    "train.threads=1",
)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> Blocks:
    folder = tmp_path_factory.mktemp("corpus")
    ids = np.random.default_rng(1).integers(0, 256, 1000).astype("<u2")
    (folder / "t.bin").write_bytes(ids.tobytes())
    return Blocks(Corpus(folder, "<u2", 1000, "d", (("t.bin", 1000),)), 16, np.arange(40))


def go(blocks, *more, model=None, moments=None, work=None, max_tokens=2048, clock=None, precision="float32"):
    config = resolve(None, [*SETTINGS, *more])
    model = model or drawn_model(ModelSpec("config:gpt2-tiny"), 0)
    steps = config.train.local_steps
    work = work or Work("a", 1, 0, 10, steps, Cursor(0, 0))
    return pretrain(
        model,
        blocks,
        config,
        clock or Clock(1e6),
        work,
        moments=moments or {},
        precision=precision,
        max_tokens=max_tokens,
    )


def same(one, two, *, atol: float = 0.0) -> None:
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, two[name], rtol=0, atol=atol, err_msg=name)


def test_h02_the_loss_is_the_shifted_cross_entropy_of_the_block(blocks) -> None:
    import torch
    import torch.nn.functional as F

    model = drawn_model(ModelSpec("config:gpt2-tiny"), 0).eval()
    found = block_loss(model, blocks.stack([3, 4]), count_correct=True)
    ids = torch.from_numpy(blocks.stack([3, 4]))
    logits = model(input_ids=ids[:, :-1]).logits
    expected = sum(F.cross_entropy(logits[i], ids[i, 1:], reduction="sum") for i in range(2))
    assert (found.tokens, abs(float(found.loss - expected)) < 1e-3) == (32, True)
    assert score_blocks(model, blocks, batch_size=7)["tokens"] == 40 * 16


def test_h01_a_step_is_one_of_torch_adamw_over_all_its_blocks(blocks) -> None:
    import torch

    from umbel.data.cursor import take

    got = go(blocks, "train.local-steps=1", "train.clip-norm=0")
    model = drawn_model(ModelSpec("config:gpt2-tiny"), 0)
    picked, _ = take(Cursor(0, 0), 40, 4, seed=42, site="a")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    model.train()
    (block_loss(model, blocks.stack(picked)).loss / 64).backward()
    optimizer.step()
    # AdamW's first step is about lr x sign(g): where g is of the size of its rounding, so is the difference.
    difference = [np.abs(a - got.arrays[n]) for n, a in read_state(model, "full").items()]
    assert np.median(np.concatenate([d.ravel() for d in difference])) < 1e-7
    assert np.mean(np.concatenate([d.ravel() for d in difference]) < 1e-5) > 0.999
    assert (got.tokens, got.steps, got.partial) == (64, 1, False)


def test_smaller_micro_batches_change_only_the_order_of_sums(blocks) -> None:
    one = go(blocks, "train.local-steps=2", "train.learning-rate=1e-4")
    two = go(blocks, "train.local-steps=2", "train.learning-rate=1e-4", max_tokens=16)
    same(one.arrays, two.arrays, atol=2e-4)
    assert abs(one.loss - two.loss) < 1e-6


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_kept_moments_make_two_rounds_one_and_reset_does_not(blocks, optimizer) -> None:
    """Row 23: keep and reset both work; H25: the inner state survives the exchange."""
    more = (f"train.optimizer={optimizer}", "train.schedule=cosine")
    long = go(blocks, *more, "train.local-steps=6")
    found = {}
    for state in ("keep", "reset"):
        settings = (*more, "train.local-steps=3", f"train.optimizer-state={state}")
        model = drawn_model(ModelSpec("config:gpt2-tiny"), 0)
        first = go(blocks, *settings, model=model)
        work = Work("a", 2, 3, 10, 3, first.cursor)
        found[state] = go(blocks, *settings, model=model, moments=first.moments, work=work)
    same(long.arrays, found["keep"].arrays)
    assert found["reset"].moments == {}
    assert any((long.arrays[n] != a).any() for n, a in found["reset"].arrays.items())
    slots = {key.rsplit("/", 1)[1] for key in found["keep"].moments}
    assert slots == {"step", "exp_avg", "exp_avg_sq"} | (
        {"momentum_buffer"} if optimizer == "muon" else set()
    )


def test_muon_takes_hidden_matrices_only(blocks) -> None:
    model = drawn_model(ModelSpec("config:llama-tiny"), 0)
    named = named_trainable(model, "full")
    chosen = {id(p) for p in hidden_matrices(model, named)}
    names = {n for n, p in named.items() if id(p) in chosen}
    assert names == {n for n in named if n.endswith("_proj.weight")}
    assert len(names) == 14
    moved = go(blocks, "train.optimizer=muon", "train.local-steps=3")
    assert moved.loss < np.log(259) + 0.2


def test_a_compiled_model_keeps_its_names(blocks) -> None:
    model = drawn_model(ModelSpec("config:gpt2-tiny"), 0)
    names = list(read_state(model, "full"))
    plain = go(blocks, "train.local-steps=2", "train.learning-rate=1e-4")
    got = go(blocks, "train.local-steps=2", "train.learning-rate=1e-4", "train.compile=eager", model=model)
    assert list(got.arrays) == list(read_state(model, "full")) == names
    assert model._umbel_compiled == "eager"
    same(plain.arrays, got.arrays, atol=2e-4)


def test_gradient_checkpointing_and_bf16_products(blocks) -> None:
    plain = go(blocks, "train.local-steps=1", "train.learning-rate=1e-4")
    model = drawn_model(ModelSpec("config:gpt2-tiny"), 0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    same(
        plain.arrays,
        go(blocks, "train.local-steps=1", "train.learning-rate=1e-4", model=model).arrays,
        atol=2e-4,
    )
    low = go(blocks, "train.local-steps=1", precision="bf16")
    assert {a.dtype.name for a in low.arrays.values()} == {"float32"}
    assert abs(low.loss - plain.loss) < 0.02
    assert low.loss != plain.loss


def test_a_time_boxed_round_reports_what_it_did(blocks) -> None:
    got = go(blocks, "train.local-steps=500", "train.round-seconds=0.000001")
    assert (got.steps, got.tokens, got.partial) == (1, 64, True)
    with pytest.raises(Refusal, match="no step"):
        go(blocks, clock=Clock(0.0))


def test_a_lease_is_followed_and_ends_the_round(blocks) -> None:
    from umbel.data.leases import positions

    work = Work("a", 1, 0, 10, 5, Cursor(0, 0), ((0, 4, 9), (0, 20, 24)))
    seen = []

    class Watched(Blocks):
        def stack(self, picked):
            seen.extend(int(i) for i in picked)
            return super().stack(picked)

    got = go(Watched(blocks.corpus, 16, blocks.chosen), work=work)
    assert seen == positions(work.lease, 40, seed=42)[:8].tolist()
    assert (got.steps, got.partial, got.cursor) == (2, True, Cursor(0, 0))
    with pytest.raises(Refusal, match="not one step"):
        go(blocks, work=replace(work, lease=((0, 0, 3),)))


def test_what_this_machine_lacks_is_said(blocks, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(Refusal, match="needs bitsandbytes"):
        go(blocks, "train.optimizer=adamw8bit")


def test_h18_a_loss_that_is_not_finite_is_refused(blocks) -> None:
    import torch

    model = drawn_model(ModelSpec("config:gpt2-tiny"), 0)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias[0] = float("nan")
    with pytest.raises(Refusal, match="non_finite"):
        go(blocks, model=model)
