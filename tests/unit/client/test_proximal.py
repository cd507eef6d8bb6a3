"""FedProx in product space: the gradient of its formula, no dependence on the basis, frozen factors stay."""

from __future__ import annotations

import pytest
import torch

from client_app.proximal import Anchor, anchors_of, pull_back_products
from umbel.config import resolve
from umbel.errors import ConfigError
from umbel.models.adapter import adapted_modules, attach
from umbel.models.lora import LoraSettings
from umbel.models.source import ModelSpec, load_model

SCALE = 1.5


def layer(seed: int = 0) -> Anchor:
    """Float64 factors of rank 3, 7 x 5, away from their start."""
    draw = torch.Generator().manual_seed(seed)
    a, b, a0, b0 = (
        0.3 * torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((3, 5), (7, 3), (3, 5), (7, 3))
    )
    return Anchor(a.requires_grad_(), b.requires_grad_(), a0, b0, SCALE)


def penalty(x: Anchor) -> torch.Tensor:
    return SCALE**2 / 2 * ((x.b @ x.a - x.b_start @ x.a_start) ** 2).sum()


def test_the_step_is_the_gradient_of_the_penalty() -> None:
    x = layer()
    grad_a, grad_b = torch.autograd.grad(penalty(x), (x.a, x.b))
    a, b = x.a.detach().clone(), x.b.detach().clone()
    pull_back_products([x], 0.01)
    assert torch.allclose(x.a, a - 0.01 * grad_a, rtol=0, atol=1e-14)
    assert torch.allclose(x.b, b - 0.01 * grad_b, rtol=0, atol=1e-14)
    assert float(grad_a.norm()) > 0.1 < float(grad_b.norm())


def test_a_start_in_another_basis_pulls_the_same_and_an_equal_product_not_at_all() -> None:
    """Pulling the numbers themselves would move both: the factors differ, the update does not."""
    turn = torch.randn(3, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    x, y = layer(), layer()
    y = y._replace(a_start=torch.linalg.solve(turn, y.a_start), b_start=y.b_start @ turn)
    pull_back_products([x], 0.02)
    pull_back_products([y], 0.02)
    assert torch.allclose(x.a, y.a, rtol=0, atol=1e-12)
    assert torch.allclose(x.b, y.b, rtol=0, atol=1e-12)

    z = layer()
    z = z._replace(
        a_start=torch.linalg.solve(turn, z.a.detach().clone()), b_start=z.b.detach().clone() @ turn
    )
    a = z.a.detach().clone()
    pull_back_products([z], 0.5)
    assert torch.allclose(z.a, a, rtol=0, atol=1e-12)
    assert float((z.a_start - a).norm()) > 0.1


def test_a_frozen_factor_stays_and_a_huge_pull_lands_no_further_away() -> None:
    x = layer()
    x.a.requires_grad_(False)
    a, before = x.a.clone(), float(penalty(x).detach())
    pull_back_products([x], 1e9)
    assert torch.equal(x.a, a)
    assert float(penalty(x).detach()) < before


@pytest.mark.parametrize("name", ["builtin:tiny-llama", "builtin:tiny-gpt2"])
def test_every_adapted_layer_of_a_model_is_an_anchor(name: str) -> None:
    model = attach(load_model(ModelSpec(name)), LoraSettings(rank=2, alpha=6))
    found = anchors_of(model)
    modules = adapted_modules(model)
    assert [(tuple(x.a.shape), tuple(x.b.shape), x.scale) for x in found] == [
        ((2, m.in_features), (m.out_features, 2), 3.0) for m in modules
    ]
    assert all(x.a.data_ptr() != x.a_start.data_ptr() for x in found)


@pytest.mark.parametrize("setting", ["train.mode=full", "run.method=ravan", "run.method=fedsb"])
def test_a_product_that_is_not_trained_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="proximal-space"):
        resolve(None, ["train.proximal-space=product", setting])
