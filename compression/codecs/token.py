"""`tok8(rtn|sr)`: int8 with one scale per token, for activations and their gradients in split learning.

A token is a row of the last dimension; outlier channels are then paid for by their own token only.
Otherwise as `int8(D)`: 8 + 16/D bits. Data is fresh at every step, so no residual is kept; gradients use
`sr` (unbiased). All tensors of a group share their last dimension. Reference: LLM.int8, Dettmers et al.
2022 (row-wise scales).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compression.bounds import Bound, NoBound, Unbiased
from compression.codecs.base import Decoder, Encoded
from compression.codecs.int_block import IntBlockCodec
from compression.errors import EncodeError, FrameError
from compression.frame import FrameWriter
from compression.layout import TensorSpec
from compression.source import Source
from compression.spec import Pipeline, stage


@dataclass(frozen=True)
class TokenCodec:
    rounding: str
    align = 1

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline((stage("tok8", rounding=self.rounding),))

    @property
    def bound(self) -> Bound:
        if self.rounding == "sr":
            return Unbiased(float("inf"))  # B / (4 L^2) for rows of B values: known once the layout is
        return NoBound("activations carry no residual; |err| <= s/2 of the token's own scale")

    def rows(self, entries: Sequence[TensorSpec]) -> IntBlockCodec:
        """The block codec whose block is the common last dimension. Raises EncodeError if there is none."""
        widths = {entry.shape[-1] if entry.shape else 1 for entry in entries}
        if len(widths) != 1:
            name = entries[-1].name if entries else ""
            raise EncodeError(name, f"differs in its last dimension from others, got {sorted(widths)!r}.")
        return IntBlockCodec(8, widths.pop(), self.rounding)

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...]:
        return self.rows(entries).fixed_sections(entries)

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded:
        return Encoded(self.pipeline, self.rows(source.entries).encode(source, writer, seed).nnz)

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> Decoder:
        try:
            inner = self.rows(entries)
        except EncodeError as error:
            raise FrameError("spec", str(error)) from error
        return inner.open(views, entries, nnz, seed)
