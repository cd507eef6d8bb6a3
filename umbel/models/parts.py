"""Head, body and tail of a Transformers causal LM, as slices of its own modules; no modelling code is copied.

    head  embedding + blocks [0, k)      body  blocks [k, n - t)      tail  blocks [n - t, n) + final norm + LM head

With t = 0 the body ends with norm and LM head (two-part). A part is a shallow copy of the model's inner part with a
sliced block list and a sliced configuration: it computes masks and positions by the model's own code. Adapters are
attached to the whole model first, so that every part's tensors keep their whole-model names.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

from umbel.errors import ModelError
from umbel.models.state import state_tensors

# Inner model's attributes: block list, token embedding, position embedding, final norm, dropout after the embedding.
FAMILIES = {
    "model": ("layers", "embed_tokens", "", "norm", ""),
    "transformer": ("h", "wte", "wpe", "ln_f", "drop"),
}


class Cut(NamedTuple):
    """Blocks of each part: head [0, head), body [head, last), tail [last, blocks)."""

    blocks: int
    head: int
    last: int
    # Blocks of the auxiliary model, a copy of the body's first ones with norm and LM head.
    aux: int = 0

    @property
    def tail(self) -> int:
        """Blocks of the tail; 0 in two-part."""
        return self.blocks - self.last


def plan_cut(config: Any, head: int, tail: int) -> Cut:
    """Return the cut of a model with this configuration; raises ModelError when head and tail are more than there is."""
    blocks = int(config.get_text_config().num_hidden_layers)
    if head < 1 or tail < 0 or head + tail > blocks:
        raise ModelError(
            f"split.head = {head} and split.tail = {tail} do not fit a model of {blocks} blocks. "
            f"Allowed: head >= 1, head + tail <= {blocks}."
        )
    return Cut(blocks, head, blocks - tail)


def block_of(name: str) -> int | None:
    """Return the block a whole-model tensor name belongs to, None for embedding, norm and LM head."""
    parts = name.split(".")
    for before, part in itertools.pairwise(parts):
        if before in ("layers", "h") and part.isdigit():
            return int(part)
    return None


def names_of(names: list[str], cut: Cut, part: str) -> list[str]:
    """Return the tensor names of `part` ('head', 'body', 'tail'), in their order."""

    def where(name: str) -> str:
        block = block_of(name)
        if block is None:
            return (
                "head"
                if "embed" in name or "wte" in name or "wpe" in name
                else ("tail" if cut.tail else "body")
            )
        return "head" if block < cut.head else ("body" if block < cut.last else "tail")

    if part == "aux":
        reach = min(cut.head + cut.aux, cut.blocks)
        return [name for name in names if cut.head <= (block_of(name) or 0) < reach]
    return [name for name in names if where(name) == part]


class Part:
    """One part of a model; `parameters` are its adapter's, by whole-model name."""

    def __init__(self, model: Any, cut: Cut, part: str) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        inner_name = next((n for n in FAMILIES if hasattr(base, n)), "")
        if not inner_name or not hasattr(getattr(base, inner_name), FAMILIES[inner_name][0]):
            raise ModelError(
                f"{type(base).__name__} is no architecture that can be cut. Known: Llama-like and GPT-2."
            )
        blocks, tokens, positions, norm, drop = FAMILIES[inner_name]
        inner = getattr(base, inner_name)
        first, last = {
            "head": (0, cut.head),
            "body": (cut.head, cut.last),
            "tail": (cut.last, cut.blocks),
            "aux": (cut.head, min(cut.head + cut.aux, cut.blocks)),
        }[part]
        self.part, self.first = part, first == 0
        ends = part == "aux" or (last == cut.blocks and part != "head")
        self.inner = slice_inner(inner, blocks, first, last)
        if not self.first:
            setattr(self.inner, tokens, None)
            if positions:
                setattr(self.inner, positions, _zero())
                setattr(self.inner, drop, _identity())
        if not ends:
            setattr(self.inner, norm, _identity())
        self.output = base.get_output_embeddings() if ends else None
        self.refresh(model, cut)

    def refresh(self, model: Any, cut: Cut) -> None:
        """Take the adapter's tensors as they are now in the whole model."""
        tensors = state_tensors(model, "lora")
        held = set(names_of(list(tensors), cut, self.part))
        self.parameters = {n: p for n, p in tensors.items() if n in held}
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    @property
    def device(self) -> Any:
        """Where the part's tensors are."""
        return next(iter(self.inner.parameters())).device

    def __call__(self, value: Any) -> Any:
        """Return the last hidden state [B, T, d] of token ids [B, T] (head) or of hidden states [B, T, d]."""
        given = {"input_ids": value} if self.part == "head" else {"inputs_embeds": value}
        return self.inner(**given, use_cache=False).last_hidden_state


def slice_inner(inner: Any, blocks: str, first: int, last: int) -> Any:
    """Return a shallow copy of an inner model that runs blocks [first, last) only; modules are shared."""
    import torch

    made = copy.copy(inner)
    made._modules = dict(inner._modules)
    made.config = copy.deepcopy(inner.config)
    text = made.config.get_text_config()
    text.num_hidden_layers = last - first
    kinds = getattr(text, "layer_types", None)
    if kinds:
        text.layer_types = list(kinds)[first:last]
    setattr(made, blocks, torch.nn.ModuleList(list(getattr(inner, blocks))[first:last]))
    return made


def _identity() -> Any:
    import torch

    return torch.nn.Identity()


def _zero() -> Any:
    import torch

    class Zero(torch.nn.Module):
        """Position embedding of a part that gets embedded input: nothing is added a second time."""

        def forward(self, positions: Any) -> Any:
            return torch.zeros((), device=positions.device)

    return Zero()
