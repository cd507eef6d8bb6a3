"""A frozen base whose linear layers lie in 4 or 8 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

    y = x dequantise(W_q)^T + b        nf4: blocks of 64, one fp32 scale a block        int8: one fp32 scale a row

Codes, scales and their way back are those of bitsandbytes, on the CPU as far as its kernels go (4-bit blocks and row
scales do). The weight is made whole for each product and again in the backward pass, never kept: memory is that of the
codes. Activations are not quantised. The output head and everything that is no linear layer keep their precision.

Such a matrix is a code, not a vector: it is never averaged, sent, merged into or trained. Adapters are trained beside
it and merged into the full-precision base (`umbel.models.export`).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from umbel.models.problem import model_error

if TYPE_CHECKING:
    import torch
    from torch import nn

QUANTIZATIONS = ("none", "nf4", "int8")
BLOCK = 64


def quantise(model: Any, kind: str) -> Any:
    """Replace the linear layers of `model`, but the output head, by quantised ones; returns the model.

    Raises ModelError without bitsandbytes, and when there is no linear layer to quantise.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise model_error(
            f"model.quantization = {kind!r} needs the package bitsandbytes",
            got="not installed",
            allowed="'none', or bitsandbytes >= 0.50",
            remedy="Install the extra: pip install 'umbel[quantised]'.",
        )
    head = model.get_output_embeddings()
    linear = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear" and module is not head
    ]
    if not linear:
        raise model_error(
            "model.quantization finds no linear layer",
            got=type(model).__name__,
            allowed="a model with nn.Linear layers (Conv1D is not quantised)",
            remedy="Use model.quantization = 'none'.",
        )
    made = _layer_type()
    for name, module in linear:
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], made(module, kind))
    return model


def plain_kind(layer: nn.Module) -> str:
    """Return the class name of a layer, of a quantised one that of what it stands for."""
    return str(getattr(layer, "stands_for", type(layer).__name__))


def encode(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, float32 scales) of a matrix [out, in]."""
    import bitsandbytes.functional as bnb
    import torch

    if kind == "nf4":
        codes, state = bnb.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
        )
        return codes, state.absmax.float()
    scale = weight.float().abs().amax(dim=1)
    codes = torch.round(weight.float() * (127.0 / scale.clamp_min(1e-30))[:, None]).to(torch.int8)
    return codes, scale


def decode(
    codes: torch.Tensor, scale: torch.Tensor, kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the matrix [out, in] that codes and scales stand for."""
    import bitsandbytes.functional as bnb
    import torch

    if kind == "nf4":
        # Not into a buffer of ours: that form has no CPU kernel.
        state = bnb.QuantState(
            absmax=scale, shape=torch.Size(shape), dtype=dtype, blocksize=BLOCK, quant_type="nf4"
        )
        return bnb.dequantize_4bit(codes, quant_state=state)
    return (codes.float() * (scale / 127.0)[:, None]).to(dtype)


_MADE: list[Any] = []


def _layer_type() -> Any:
    """Return the module class; made once, because PyTorch is imported late."""
    if _MADE:
        return _MADE[0]
    import torch
    from torch import nn

    class Product(torch.autograd.Function):
        """x W^T with W made from its codes in both passes; no gradient for the codes."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
            ctx.layer = layer
            return nn.functional.linear(x, layer.dequantised().to(x.dtype))

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            (gradient,) = gradients
            return gradient @ ctx.layer.dequantised().to(gradient.dtype), None

    class QuantisedLinear(nn.Linear):
        """An `nn.Linear` whose `weight` holds codes."""

        stands_for = "Linear"

        def __init__(self, layer: nn.Linear, kind: str) -> None:
            super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
            self.kind, self.compute_dtype = kind, layer.weight.dtype
            codes, scale = encode(layer.weight.detach(), kind)
            self.weight = nn.Parameter(codes, requires_grad=False)
            self.register_buffer("scale", scale)
            self.bias = layer.bias

        def dequantised(self) -> torch.Tensor:
            """Return the matrix that the codes stand for."""
            shape = (self.out_features, self.in_features)
            return decode(self.weight.data, self.scale, self.kind, shape, self.compute_dtype)  # type: ignore[arg-type]

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            out = Product.apply(input, self)
            return out if self.bias is None else out + self.bias.to(out.dtype)

    _MADE.append(QuantisedLinear)
    return QuantisedLinear
