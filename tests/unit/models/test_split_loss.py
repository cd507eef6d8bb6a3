"""The loss in blocks is the plain loss, and never holds more logits than a block's."""

from __future__ import annotations

import pytest
import torch

from umbel.split_loss import blocked_loss, hidden_loss


@pytest.mark.parametrize("block", [1, 3, 7, 64])
def test_blocks_give_loss_and_gradient_of_the_plain_one_s5(block: int) -> None:
    torch.manual_seed(0)
    output = torch.nn.Linear(8, 50, bias=False).requires_grad_(False)
    labels = torch.randint(0, 50, (3, 9))
    labels[0, :4] = -100
    found = {}
    for size in (0, block):
        hidden = torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
        loss = hidden_loss(output, hidden, labels, size)
        (loss / 21).backward()
        found[size] = float(loss.detach()), hidden.grad
    assert found[block][0] == pytest.approx(found[0][0], rel=1e-6)
    torch.testing.assert_close(found[block][1], found[0][1], atol=1e-6, rtol=0)
    assert float(found[0][1].abs().max()) > 1e-3


def test_no_more_logits_than_a_block_of_them(monkeypatch) -> None:
    seen = []
    plain = torch.logsumexp
    monkeypatch.setattr(
        torch, "logsumexp", lambda x, *a, **k: (seen.append(tuple(x.shape)), plain(x, *a, **k))[1]
    )
    rows = torch.randn(10, 4, requires_grad=True)
    blocked_loss(rows, torch.randn(30, 4), torch.arange(10), 4)
    assert seen == [(4, 30), (4, 30), (2, 30)]


def test_a_batch_without_a_label_costs_nothing_and_is_no_nan_h03() -> None:
    output = torch.nn.Linear(4, 9, bias=False).requires_grad_(False)
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    loss = hidden_loss(output, hidden, torch.full((2, 3), -100), 2)
    loss.backward()
    assert float(loss.detach()) == 0.0 and float(hidden.grad.abs().sum()) == 0.0
