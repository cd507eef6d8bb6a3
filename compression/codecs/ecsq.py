"""`ecsq(rate=|step=|rms=, theta=)|rans|zstd`: dead-zone uniform quantiser and an entropy coder.

    q = sgn(x) floor(|x|/step + theta), 0 < theta <= 1/2       levels: bins 1 and 2 at their mean magnitude,
                                                               bins >= 3 at (|q| + mean offset) step
Bound: Absolute(step), and contractive by the centroid levels. One global step for all tensors is the
mean-square optimal bit allocation (reverse water-filling). `rate` (bits a value) and `rms` (step over rms)
are requests: the frame records the step. The three mean offsets travel in `levels`; every block of 2^18
values has its own table. Coder: rANS, or zstd on the symbol plane from about 3.3 bits on. Symbols are never
clamped: |q| > 127 is refused for a given step, and avoided by a larger one for a rate. References: Sullivan
1996 (dead zone), Duda 2013 (rANS).

Sections: `levels` (3 fp32), `blen` (u32 bytes a block), `data`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compression import rans_tables as rans
from compression import zstd
from compression.bounds import Absolute, Bound
from compression.codecs.base import (
    SEGMENT,
    Encoded,
    PlainDecoder,
    expect_nnz,
    numel_of,
    segments,
    take,
    words,
)
from compression.errors import FrameError
from compression.frame import FrameWriter
from compression.kernels import kernels
from compression.kernels.ref_ecsq import HISTOGRAM_BINS
from compression.layout import TensorSpec
from compression.parallel import for_each
from compression.rate import RateModel
from compression.source import Source
from compression.spec import Pipeline, stage

_ZSTD_FROM_BITS = 3.3
_CENTRE = 128
_local = threading.local()


@dataclass(frozen=True)
class EcsqCodec:
    rate: float | None
    step: float | None
    rms: float | None
    theta: float | None
    coder: str | None  # "rans", "zstd" or None: choose by the predicted entropy
    align = 1

    @property
    def bound(self) -> Bound:
        return Absolute(self.step)

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> None:
        return None

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded:
        step, theta, coder = self._resolve(source)
        spans = segments(source.numel)
        # worst case of a block: a table of 256 words, the states, one word a symbol
        room = writer.reserve(12 + 4 * len(spans))
        head = room.size
        writer.advance(head)
        sums, counts, lengths = np.zeros(3, np.int64), np.zeros(256, np.int64), np.zeros(len(spans), "<u4")
        for first in range(0, len(spans), 16):  # a few blocks at a time, so that threads can share them
            blocks = for_each(
                lambda span: _block(source, span, step, theta, coder), spans[first : first + 16]
            )
            for number, (parts, block_sums, block_counts) in enumerate(blocks, first):
                for part in parts:
                    raw = part.view(np.uint8)
                    writer.reserve(raw.size)[:] = raw
                    writer.advance(raw.size)
                    lengths[number] += raw.size
                sums += block_sums
                counts += block_counts
        writer.patch(
            0, np.concatenate([_offsets(sums, counts, theta).view(np.uint8), lengths.view(np.uint8)])
        )
        writer.split_section(("levels", 12), ("blen", 4 * len(spans)))
        writer.end_section("data")
        resolved = Pipeline((stage("ecsq", step=float(step), theta=float(theta)), stage(coder)))
        return Encoded(resolved, source.numel)

    def _resolve(self, source: Source) -> tuple[np.float32, np.float32, str]:
        theta = 0.5 if self.theta is None else self.theta
        if self.step is not None and self.coder is not None:
            return _step32(self.step), np.float32(theta), self.coder
        model = RateModel(histograms(source))
        if self.step is not None:
            step = self.step
        elif self.rms is not None:
            step = max(self.rms * model.rms, model.smallest_step())
        else:
            assert self.rate is not None
            step, theta = model.best_for_bits(self.rate, self.theta)
        chosen, theta32 = _step32(step), np.float32(theta)
        bits = model.predict(float(chosen), float(theta32)).bits
        return chosen, theta32, self.coder or ("zstd" if bits >= _ZSTD_FROM_BITS else "rans")

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> _Decoder:
        numel = numel_of(entries)
        blocks = len(segments(numel))
        levels, blen, data = take(views, levels=12, blen=4 * blocks, data=None)
        expect_nnz(nnz, numel)
        if self.step is None or self.coder is None:
            raise FrameError("spec", "a frame must record the step and the coder")
        ends = np.cumsum(words(blen, "<u4").astype(np.int64))
        if (blocks and ends[-1] != data.size) or (not blocks and data.size):
            raise FrameError("tiling", "blocks do not fill the data section")
        table = level_table(_step32(self.step), words(levels, "<f4"))
        return _Decoder(self.coder, table, data, np.concatenate([[0], ends]), numel)


def _step32(step: float) -> np.float32:
    return np.float32(min(max(step, 2.0**-126), 3.4e38))


def histograms(source: Source) -> np.ndarray:
    """(blocks, 2048) log histograms of |x|. Raises NonFiniteError naming the tensor."""
    spans = segments(source.numel)
    counts = np.zeros((len(spans), HISTOGRAM_BINS), np.int64)

    def run(number: int) -> None:
        start, stop = spans[number]
        x = source.segment(start, stop)
        if kernels(source.numel).log_histogram(x, counts[number]) >= 0:
            source.check_finite(start, x)

    for_each(run, range(len(spans)))
    return counts


def _block(
    source: Source, span: tuple[int, int], step: np.float32, theta: np.float32, coder: str
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Quantise and code one block: (pieces of the payload, fraction sums, symbol counts)."""
    start, stop = span
    x = source.segment(start, stop)
    run_on = kernels(source.numel, heavy=True)
    symbols = _scratch("symbols", np.uint8)[: x.size]
    counts, sums = np.zeros(256, np.int64), np.zeros(3, np.int64)
    status = run_on.ecsq_quantise(x, step, theta, symbols, counts, sums)
    if status >= 0:
        source.check_finite(start, x)
        source.refuse(start + status // 2, f"has a value above 127 steps of {step:g}. Use a larger step.")
    if coder == "zstd":
        return [np.frombuffer(zstd.compress(symbols), np.uint8)], sums, counts
    freqs = rans.normalise(counts)
    states, stream = np.zeros(rans.LANES, "<u4"), _scratch("stream", np.uint16)[: x.size + 8]
    first = run_on.rans_encode(symbols, freqs, states, stream)
    return [rans.write_table(freqs), states, stream[first:].copy()], sums, counts


def _scratch(name: str, dtype: type) -> np.ndarray:
    """A buffer of this thread for one block: fresh pages would cost as much as a pass over them."""
    if not hasattr(_local, name):
        setattr(_local, name, np.empty(SEGMENT + 8, dtype))
    return getattr(_local, name)


def _offsets(sums: np.ndarray, counts: np.ndarray, theta: np.float32) -> np.ndarray:
    """Mean of |x|/step - |q| over |q| = 1, 2 and >= 3, as fp32; 0 where there is none."""
    both = counts[_CENTRE:] + np.concatenate([[0], counts[_CENTRE - 1 : 0 : -1]])
    groups = np.array([both[1], both[2], both[3:].sum()])
    means = (sums + groups / 2) / (np.maximum(groups, 1) * 65536.0) - float(theta)
    return np.where(groups > 0, means, 0.0).astype("<f4")


def level_table(step: np.float32, offsets: np.ndarray) -> np.ndarray:
    """(256,) fp32 reconstruction of each symbol; symbol 0 (q = -128) is illegal and decodes to NaN."""
    if not (np.isfinite(offsets).all() and (np.abs(offsets) <= 1).all()):
        raise FrameError("levels", "offsets must lie in [-1, 1]")
    size = np.arange(_CENTRE, dtype=np.float32)
    size[1:2] += offsets[0]
    size[2:3] += offsets[1]
    size[3:] += offsets[2]
    with np.errstate(over="ignore"):
        positive = size * step
    table = np.concatenate([[np.float32(np.nan)], -positive[:0:-1], positive]).astype(np.float32)
    return table


class _Decoder(PlainDecoder):
    def __init__(self, coder: str, table: np.ndarray, data: np.ndarray, ends: np.ndarray, numel: int) -> None:
        self.coder, self.table, self.data, self.ends, self.numel = coder, table, data, ends, numel

    def decode(self, start: int, out: np.ndarray) -> None:
        block = start // SEGMENT
        payload = self.data[self.ends[block] : self.ends[block + 1]]
        run_on = kernels(self.numel, heavy=True)
        if self.coder == "zstd":
            run_on.lookup(zstd.decompress(payload, out.size), self.table, out)
            return
        stream = words(payload, "<u2")
        freqs, used = rans.read_table(stream)
        if stream.size < used + 2 * rans.LANES:
            raise FrameError("rans", "truncated")
        states = stream[used : used + 2 * rans.LANES].copy().view("<u4")
        rest = stream[used + 2 * rans.LANES :]
        if run_on.rans_decode(rest, states, rans.decode_table(freqs), self.table, out) != rest.size:
            raise FrameError("rans", f"block {block} does not end in its initial state")
