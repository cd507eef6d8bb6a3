"""`topk(C,k)|sign2|rice`: the k largest magnitudes of every chunk of C, two-level values, coded gaps.

Ties go to the lowest index; a short chunk of c values keeps ceil(k c / C). Values: `fp32`, `bf16`, or
`sign2` (a sign and a magnitude bit; the two levels are the mean magnitudes below and from the mean, per
2^18 values). Indices: `flat` (log2 C bits each) or `rice` (Golomb-Rice coded gaps, parameter chosen per
2^18 values).

Bound: Contractive(k/C) with exact values, deterministic: the error energy is the energy of what was
dropped. With `sign2` the guarantee is weak (2^-18) though the measured loss is small. References: Aji and
Heafield 2017; SparseLoCo, Sarfi et al. 2025; Rice 1979.

Sections: `levels` (sign2: 2 fp32 per tensor and 2^18), `val`, `blen` (u32: bytes | r << 28, per 2^18), `idx`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import ml_dtypes
import numpy as np

from compression.bounds import Bound, Contractive
from compression.codecs.base import SEGMENT, Encoded, PlainDecoder, expect_nnz, segments, take, words
from compression.errors import FrameError
from compression.frame import FrameWriter
from compression.kernels import kernels
from compression.layout import TensorSpec
from compression.parallel import for_each
from compression.source import Places, Source
from compression.spec import Pipeline, stage

_TINY = np.float32(2.0**-126)
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class TopKCodec:
    block: int
    k: int
    values: str  # "sign2", "bf16" or "fp32"
    indices: str  # "rice" or "flat"

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline((stage("topk", block=self.block, k=self.k), stage(self.values), stage(self.indices)))

    @property
    def align(self) -> int:
        return self.block

    @property
    def bound(self) -> Bound:
        kept = self.k / self.block
        return Contractive({"fp32": kept, "bf16": kept * (1 - 2.0**-16), "sign2": 1 / SEGMENT}[self.values])

    def keep(self, places: Places, start: int, stop: int) -> np.ndarray:
        """Values kept in each chunk of the padded elements [start, stop), int64."""
        return -(-self.k * places.counts(start, stop) // self.block)

    def num_kept(self, entries: Sequence[TensorSpec]) -> int:
        """Values that travel in all: a function of the layout."""
        total = 0
        for entry in entries:
            full, rest = divmod(entry.numel, self.block)
            total += full * self.k + -(-self.k * rest // self.block)
        return total

    def level_sizes(self, places: Places, start: int, stop: int) -> np.ndarray:
        """Kept values of each tensor in the segment: every tensor has its own two levels, int64."""
        keep = self.keep(places, start, stop)
        sizes = []
        for _, first, last in places.pieces(start, stop):
            sizes.append(int(keep[(first - start) // self.block : -(-(last - start) // self.block)].sum()))
        return np.array(sizes, np.int64)

    def fixed_sections(self, entries: Sequence[TensorSpec]) -> tuple[tuple[str, int], ...] | None:
        if self.indices == "rice":
            return None
        places = Places(entries, self.block)
        counts = [int(self.keep(places, *span).sum()) for span in segments(places.numel)]
        sizes = [("val", sum(self._value_bytes(n) for n in counts)), ("blen", 4 * len(counts))]
        sizes.append(("idx", sum(-(-n * self._index_bits // 8) for n in counts)))
        if self.values == "sign2":
            sizes.insert(0, ("levels", 8 * self._num_levels(places)))
        return tuple(sizes)

    def _num_levels(self, places: Places) -> int:
        return sum(self.level_sizes(places, *span).size for span in segments(places.numel))

    @property
    def _index_bits(self) -> int:
        return self.block.bit_length() - 1

    def _value_bytes(self, count: int) -> int:
        return {"sign2": -(-count // 4), "bf16": 2 * count, "fp32": 4 * count}[self.values]

    def encode(self, source: Source, writer: FrameWriter, seed: int) -> Encoded:
        found = for_each(lambda span: self._segment(source, *span), segments(source.numel))
        if self.values == "sign2":
            writer.section("levels", _joined([levels for levels, _, _, _ in found]))
        writer.section("val", _joined([values for _, values, _, _ in found]))
        lengths = [index.size | r << 28 for _, _, index, r in found]
        writer.section("blen", np.array(lengths, "<u4"))
        writer.section("idx", _joined([index for _, _, index, _ in found]))
        return Encoded(self.pipeline, self.num_kept(source.entries))

    def _segment(
        self, source: Source, start: int, stop: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """(levels, value bytes, index bytes, rice parameter) of one segment."""
        x = source.segment(start, stop)
        source.check_finite(start, x)
        keep = self.keep(source, start, stop)
        index = np.empty(int(keep.sum()), np.uint16)
        run_on = kernels(source.numel, heavy=True)
        run_on.topk_select(x, self.block, keep, index)
        kept = x[positions(index, keep, self.block)]
        levels, values = self._quantise(source, start, kept, self.level_sizes(source, start, stop))
        if self.indices == "flat":
            return levels, values, _pack_flat(index, self._index_bits), 0
        gaps = run_on.gaps_of(index, keep)
        r = run_on.rice_parameter(gaps)
        out = np.empty(int((gaps >> r).sum()) // 8 + gaps.size * (r + 1) // 8 + 9, np.uint8)
        return levels, values, out[: run_on.rice_encode(gaps, r, out)], r

    def _quantise(
        self, source: Source, start: int, kept: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        nothing = np.zeros(0, "<f4")
        if self.values == "fp32":
            return nothing, kept.astype("<f4").view(np.uint8)
        if self.values == "bf16":
            half = kept.astype(_BF16)
            if not np.isfinite(half).all():
                source.refuse(start, "overflows bf16. Send its values as fp32.")
            return nothing, half.view(np.uint8)
        levels, symbols, place = np.zeros((sizes.size, 2), "<f4"), np.zeros(kept.size, np.uint8), 0
        for number, size in enumerate(sizes):
            part = kept[place : place + size]
            low, high, mean = two_levels(part, kernels(source.numel, heavy=True))
            if high > 0:
                levels[number] = low, high
                large = np.abs(part) >= np.float32(mean)
                symbols[place : place + size] = (part < 0) | (large.astype(np.uint8) << 1)
            place += size
        return levels.reshape(-1), _pack_pairs(symbols)

    def open(
        self, views: dict[str, np.ndarray], entries: Sequence[TensorSpec], nnz: int, seed: int
    ) -> _Decoder:
        places = Places(entries, self.block)
        expect_nnz(nnz, self.num_kept(entries))
        blocks = len(segments(places.numel))
        if self.values == "sign2":
            num_levels = self._num_levels(places)
            levels, values, blen, idx = take(
                views, levels=8 * num_levels, val=None, blen=4 * blocks, idx=None
            )
        else:
            values, blen, idx = take(views, val=None, blen=4 * blocks, idx=None)
            levels = np.zeros(0, np.uint8)
        return _Decoder(self, places, words(levels, "<f4"), values, words(blen, "<u4"), idx)


class _Decoder(PlainDecoder):
    def __init__(
        self,
        codec: TopKCodec,
        places: Places,
        levels: np.ndarray,
        values: np.ndarray,
        blen: np.ndarray,
        idx: np.ndarray,
    ) -> None:
        self.codec, self.places, self.values, self.idx = codec, places, values, idx
        self.keeps = [codec.keep(places, *span) for span in segments(places.numel)]
        self.levels = levels.reshape(-1, 2)
        self.level_sizes = [codec.level_sizes(places, *span) for span in segments(places.numel)]
        self.level_starts = np.cumsum([0, *[sizes.size for sizes in self.level_sizes]])
        self.rice = blen >> np.uint32(28)
        sizes = [codec._value_bytes(int(keep.sum())) for keep in self.keeps]
        self.value_ends = np.cumsum([0, *sizes])
        self.index_ends = np.concatenate([[0], np.cumsum((blen & np.uint32(0xFFFFFFF)).astype(np.int64))])
        if self.value_ends[-1] != values.size or self.index_ends[-1] != idx.size:
            raise FrameError("tiling", "blocks do not fill their sections")

    def _sparse(self, start: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions in the segment, fp32 values) of one segment."""
        block, keep = start // SEGMENT, self.keeps[start // SEGMENT]
        limits = self.places.counts(start, start + size)
        index = np.empty(int(keep.sum()), np.uint16)
        data = self.idx[self.index_ends[block] : self.index_ends[block + 1]]
        if self.codec.indices == "rice":
            run_on = kernels(self.places.numel, heavy=True)
            status = run_on.rice_decode(data, int(self.rice[block]), keep, limits, index)
        else:
            status = (
                _unpack_flat(data, self.codec._index_bits, keep, limits, index)
                if not self.rice[block]
                else -1
            )
        if status < 0:
            raise FrameError("index", f"block {block} holds an illegal index stream")
        raw = self.values[self.value_ends[block] : self.value_ends[block + 1]]
        return positions(index, keep, self.codec.block), self._dequantise(block, raw, index.size)

    def _dequantise(self, block: int, raw: np.ndarray, count: int) -> np.ndarray:
        if self.codec.values == "fp32":
            return words(raw, "<f4")
        if self.codec.values == "bf16":
            return (words(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        sizes, first = self.level_sizes[block], self.level_starts[block]
        levels = self.levels[first : first + sizes.size]
        symbols = _unpack_pairs(raw, count)
        owner = np.repeat(np.arange(sizes.size), sizes)
        low, high = levels[:, 0], levels[:, 1]
        usable = np.isfinite(levels) & ((levels >= _TINY) | (levels.view(np.uint32) == 0))
        unused = (high == 0) & (np.bincount(owner, weights=symbols, minlength=sizes.size) > 0)
        if not usable.all() or unused.any() or (low > high).any():
            raise FrameError("scale", f"levels of block {block}")
        table = np.stack([low, -low, high, -high], axis=1)
        return table[owner, symbols]

    def decode(self, start: int, out: np.ndarray) -> None:
        where, values = self._sparse(start, out.size)
        out[:] = 0
        out[where] = values

    def accumulate(self, start: int, out: np.ndarray, weight: float) -> bool:
        where, values = self._sparse(start, out.size)
        out[where] += values.astype(np.float64) * weight  # positions are distinct
        return True


def positions(index: np.ndarray, keep: np.ndarray, block: int) -> np.ndarray:
    """Chunk-relative indices -> positions in the segment, int64."""
    return index.astype(np.int64) + np.repeat(np.arange(keep.size) * block, keep)


def two_levels(kept: np.ndarray, run_on: ModuleType) -> tuple[float, float, float]:
    """(low, high) fp32 levels and the mean magnitude, from which on a value takes the high one; zeros if
    unusable."""
    mean, low_sum, high_sum, num_high = run_on.level_sums(kept)
    if mean < _TINY or not num_high:
        return 0.0, 0.0, 0.0
    high = high_sum / num_high
    low = low_sum / (kept.size - num_high) if num_high < kept.size else high
    return (low if low >= _TINY else 0.0), high, mean


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.view(np.uint8) for part in parts]) if parts else np.zeros(0, np.uint8)


def _pack_pairs(symbols: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-symbols.size // 4) * 4, np.uint8)
    padded[: symbols.size] = symbols
    rows = padded.reshape(-1, 4)
    return rows[:, 0] | rows[:, 1] << 2 | rows[:, 2] << 4 | rows[:, 3] << 6


def _unpack_pairs(packed: np.ndarray, count: int) -> np.ndarray:
    shifts = np.array([0, 2, 4, 6], np.uint8)
    symbols = ((packed[:, None] >> shifts) & np.uint8(3)).reshape(-1)
    if symbols[count:].any():
        raise FrameError("padding", "unused value bits are not zero")
    return symbols[:count]


def _pack_flat(index: np.ndarray, bits: int) -> np.ndarray:
    planes = (index[:, None] >> np.arange(bits, dtype=np.uint16)) & np.uint16(1)
    return np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little")


def _unpack_flat(data: np.ndarray, bits: int, keep: np.ndarray, limits: np.ndarray, index: np.ndarray) -> int:
    flat = np.unpackbits(data, bitorder="little")
    used = index.size * bits
    if -(-used // 8) != data.size or flat[used:].any():
        return -1
    weights = (1 << np.arange(bits)).astype(np.int64)
    index[:] = flat[:used].reshape(-1, bits) @ weights
    owner = np.repeat(np.arange(keep.size), keep)
    increasing = (np.diff(index.astype(np.int64)) > 0) | (np.diff(owner) > 0)
    return 0 if increasing.all() and (index < limits[owner]).all() else -1
