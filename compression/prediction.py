"""How many bytes a frame will have, before there is anything to encode.

A codec of fixed rate gives the exact size from the layout alone. For one whose size depends on the values (coded
gaps, entropy coding, a seeded support) a sample of Laplace noise in the layout's shapes is encoded:

    size of a group ~ size of its sample * elements / elements of the sample

which is what a real update of that shape comes to, not a promise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from compression.api import encode, predict_bytes
from compression.layout import DTYPES, FLOAT_DTYPES, Layout, TensorSpec
from compression.policy import Policy

SAMPLE_VALUES = 1 << 22
NOISE_SCALE = 1e-3


class Predicted(NamedTuple):
    """Bytes of a frame; `exact` tells whether it will be these to the byte."""

    num_bytes: int
    exact: bool


def expected_bytes(
    layout: Layout, policy: Policy | str, *, seed: int = 0, round_index: int = 0, base: str = ""
) -> Predicted:
    """Return the bytes of a frame of this layout and policy; seed, round and base count by their digits.

    Raises ConfigError for an illegal policy and EncodeError where the policy does not fit the layout.
    """
    fixed = predict_bytes(layout, policy, seed=seed, round_index=round_index, base=base)
    if fixed is not None:
        return Predicted(fixed, True)
    share = min(1.0, SAMPLE_VALUES / max(1, layout.numel))
    sample = Layout(tuple(_shortened(entry, share) for entry in layout.entries))
    frame = encode(_noise(sample), sample, policy, seed=seed, round_index=round_index, base=base)
    return Predicted(round(len(frame) * layout.numel / max(1, sample.numel)), False)


def _shortened(entry: TensorSpec, share: float) -> TensorSpec:
    if share >= 1.0 or not entry.shape:
        return entry
    return entry._replace(shape=(max(1, round(entry.shape[0] * share)), *entry.shape[1:]))


def _noise(layout: Layout) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        e.name: (NOISE_SCALE * draw.laplace(size=e.shape)).astype(DTYPES[e.dtype])
        if e.dtype in FLOAT_DTYPES
        else np.zeros(e.shape, DTYPES[e.dtype])
        for e in layout.entries
    }
