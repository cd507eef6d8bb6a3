"""Whether several rows may share one row of a forward pass.

Without padding, rows of length n1, n2, .. become one row [1, n1 + n2 + ..] whose position ids restart at 0:

    model(ids, position_ids=[0..n1-1, 0..n2-1, ..], attention_mask=None, use_cache=False)

Transformers derives the block-diagonal mask from the restarts. It does so only with `attention_mask=None` and
without a key/value cache: a mask of ones or `use_cache=True` silently lets rows attend to the ones before. So
the property is measured, not assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch
    from torch import nn

LENGTHS = (5, 7, 3)
TOLERANCE = 1e-5
LEAK_FRACTION = 0.05
_known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def supports_packing(model: nn.Module) -> bool:
    """Return whether packed logits equal those of the separate rows; measured once a model on 15 tokens.

    In float32 they must agree to 1e-5 of the largest logit. In half precision the difference must stay below
    a twentieth of what a row changes by when it really sees the rows before it. The mode (train or eval) and
    the random state are left as they were.
    """
    if model not in _known:
        _known[model] = _measure(model)
    return _known[model]


def _measure(model: Any) -> bool:
    import torch

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _agrees(model)
    finally:
        model.train(training)


def _agrees(model: Any) -> bool:
    import torch

    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(sum(LENGTHS), device=device)[None] * 37 + 11) % vocabulary
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])[None]
    separate = torch.cat([_logits(model, row, None) for row in ids.split(LENGTHS, dim=1)], dim=1)
    packed, joined = _logits(model, ids, positions), _logits(model, ids, None)
    error, leak = (packed - separate).abs().max(), (joined - separate).abs().max()
    if packed.dtype == torch.float32:
        return bool(error <= TOLERANCE * separate.abs().max().clamp(min=1))
    return bool(error <= LEAK_FRACTION * leak)


def _logits(model: Any, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    return model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits
