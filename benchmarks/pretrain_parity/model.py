"""A byte-level GPT small enough for one core, and the text it reads.

Four pre-norm blocks (attention, squared ReLU), RMSNorm without weights, no biases, head tied to the embedding: every
tensor is a matrix of at least 4096 elements, so that all of it goes through the codec under test. The text is split
into three runs of bytes that do not overlap: training, tuning (where rates and momenta are chosen) and held-out
(what the table shows). A batch is a function of (seed, site, step) alone, so that every arm reads the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from umbel.seeds import generator

TEXT = Path(__file__).resolve().parents[3] / "shared" / "data" / "tinyshakespeare.txt"
WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 64, 4, 4, 64, 256
SPLITS = {"train": (0.0, 0.9), "tune": (0.9, 0.95), "heldout": (0.95, 1.0)}


@dataclass(frozen=True)
class Corpus:
    """Bytes of the three splits, uint8."""

    parts: dict[str, np.ndarray]

    @classmethod
    def read(cls, path: Path = TEXT) -> Corpus:
        """Read the text; raises FileNotFoundError with the path that was looked for."""
        if not path.exists():
            raise FileNotFoundError(f"the text of this benchmark is not there: {path}")
        data = np.frombuffer(path.read_bytes(), np.uint8)
        return cls({n: data[int(a * data.size) : int(b * data.size)] for n, (a, b) in SPLITS.items()})

    def batch(self, seed: int, site: int, step: int, size: int, shards: int = 1) -> np.ndarray:
        """Return int64 [size, CONTEXT + 1] of the training split, or of the site's own run of bytes of it."""
        train = self.parts["train"]
        if shards > 1:
            train = train[train.size * site // shards : train.size * (site + 1) // shards]
        starts = generator(seed, "batch", site, step).integers(0, train.size - CONTEXT - 1, size)
        return np.stack([train[s : s + CONTEXT + 1] for s in starts]).astype(np.int64)

    def windows(self, split: str, count: int) -> np.ndarray:
        """Return int64 [count, CONTEXT + 1], spread evenly over a split."""
        part = self.parts[split]
        starts = np.linspace(0, part.size - CONTEXT - 1, count).astype(int)
        return np.stack([part[s : s + CONTEXT + 1] for s in starts]).astype(np.int64)


def make_model(seed: int) -> Any:
    """Return the model with weights drawn from `seed`."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            heads = self.qkv(F.rms_norm(x, (WIDTH,))).view(batch, length, 3, HEADS, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
            return x + self.down(F.relu(self.up(F.rms_norm(x, (WIDTH,)))).square())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.places = nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return F.rms_norm(x, (WIDTH,)) @ self.tokens.weight.T

        def loss(self, windows: Any) -> Any:
            return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    torch.manual_seed(seed)
    model = Model()
    for name, weight in model.named_parameters():
        residual = name.endswith(("out.weight", "down.weight"))
        nn.init.normal_(weight, std=0.08 / (2 * LAYERS) ** 0.5 if residual else 0.08)
    return model
