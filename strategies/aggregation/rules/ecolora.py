"""EcoLoRA: each site uploads one segment of the adapter a round; segments are averaged over their uploaders.

    segment(position, round) = (position + round) mod N_s
    x[seg] <- sum w_i x_i[seg] / sum w_i over its uploaders;  a segment nobody delivered keeps its value
    site:  x <- rho x_local + (1 - rho) x_global,  rho = exp(-beta * staleness)
    keep rate  k_t = k_min + (k_max - k_min) exp(-gamma (L_0 - L_{t-1}))

arXiv 2506.02001. `position` is the place in the *sorted cohort*: by client id, random cohorts leave segments
without an uploader in many rounds. The mixing rule and the constants are recalled, not checked against the
paper. It is an upload policy over factor averaging and inherits its bias; sparsification with feedback and
position coding belong to the compression module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from strategies.aggregation.errors import UpdateError
from strategies.aggregation.mean import check_weight
from strategies.aggregation.rules.capabilities import Capabilities

CAPABILITIES = Capabilities(
    secure_sums=True, joiner_needs="all segments", note="sums per segment, without a site's own sparsity mask"
)


class SegmentUpdate(NamedTuple):
    """One site's values of one segment of the flattened adapter."""

    site: str
    weight: float
    segment: int
    values: np.ndarray


class Segments(NamedTuple):
    """The adapter vector after the round [d], and per segment how many sites delivered it."""

    vector: np.ndarray
    coverage: np.ndarray


def bounds(size: int, num_segments: int) -> list[tuple[int, int]]:
    """Return [start, stop) of every segment; lengths differ by at most one."""
    edges = [size * j // num_segments for j in range(num_segments + 1)]
    return list(pairwise(edges))


def segment_of(position: int, round_index: int, num_segments: int) -> int:
    """Return the segment that the site at `position` (from 0) of the sorted cohort uploads in this round."""
    return (position + round_index) % num_segments


def aggregate(previous: np.ndarray, updates: Iterable[SegmentUpdate], num_segments: int) -> Segments:
    """Return the next vector in float64. Raises UpdateError for a wrong segment number or length."""
    kept = sorted((u for u in updates if check_weight(u.weight) > 0), key=lambda u: u.site)
    places = bounds(previous.size, num_segments)
    out, coverage = previous.astype(np.float64), np.zeros(num_segments, np.int64)
    for segment, (start, stop) in enumerate(places):
        members = [u for u in kept if u.segment == segment]
        coverage[segment] = len(members)
        if members:
            total = sum(u.weight for u in members)
            out[start:stop] = sum(u.weight * _values(u, stop - start) for u in members) / total
    strangers = [u.site for u in kept if not 0 <= u.segment < num_segments]
    if strangers:
        raise UpdateError("segment", "does not exist", got=strangers, allowed=f"0 .. {num_segments - 1}")
    return Segments(out, coverage)


def mix(local: np.ndarray, received: np.ndarray, staleness: float, beta: float = 1.0) -> np.ndarray:
    """Return the site's start: its own part fades exponentially with the rounds since it was refreshed."""
    rho = math.exp(-beta * staleness)
    return rho * local + (1.0 - rho) * received


def keep_rate(
    first_loss: float, last_loss: float, k_min: float, k_max: float = 0.95, gamma: float = 1.0
) -> float:
    """Return the fraction of entries kept: k_max at the start, falling to k_min as the loss falls."""
    return k_min + (k_max - k_min) * math.exp(-gamma * max(0.0, first_loss - last_loss))


def _values(update: SegmentUpdate, size: int) -> np.ndarray:
    if update.values.shape != (size,) or not np.isfinite(update.values).all():
        raise UpdateError(
            f"segment of site {update.site!r}", "does not fit", got=update.values.shape, allowed=f"({size},)"
        )
    return update.values.astype(np.float64)
