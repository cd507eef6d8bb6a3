"""Rate control: from one log histogram of |x| to the rate and the distortion of any quantiser step, in
closed form.

The histogram has 8 bins an octave (2048 in all, the top 11 bits of the fp32 pattern), one per block of the
coder, and the density is taken as flat inside a bin. With thresholds t_m = (m - theta) step the dead-zone
quantiser then has

    p_m = F0(t_{m+1}) - F0(t_m)      bits = sum over blocks of H(p) + P(q != 0)     F_k(t) = int_0^t x^k
    p(x) dx D   = sum_m F2 - 2 r_m F1 + r_m^2 F0 over each bin, r_m its mean (m = 1, 2) or (m + common
    offset) step

so that a byte budget is met by bisection on the step, without touching the data again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compression.kernels.ref_ecsq import HISTOGRAM_BINS

# (below this many bits, rounding offset): the optimum is flat, and moves from plain rounding towards a wide
# dead zone
THETAS = ((0.6, 0.28), (1.5, 0.35), (3.0, 0.42), (float("inf"), 0.5))
MAX_SYMBOL = 127
# what a block costs besides its symbols: frequency table, states, length field (bits)
_BLOCK_BITS = 8 * (2 + 32 + 4)
_TABLE_BITS = 16


def _edges() -> np.ndarray:
    bits = np.arange(HISTOGRAM_BINS, dtype=np.uint32) << np.uint32(20)
    finite = np.where(np.arange(HISTOGRAM_BINS) < 0x7F8, bits.view(np.float32), np.finfo(np.float32).max)
    return finite.astype(np.float64)


EDGES = _edges()


@dataclass(frozen=True)
class Prediction:
    """Bits per value, tables included, and NMSE = ||C(x)-x||^2 / ||x||^2 (0 for an all-zero vector)."""

    bits: float
    nmse: float


class RateModel:
    """Rate and NMSE of the dead-zone quantiser for a given set of block histograms, shape (blocks, 2048)."""

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts.astype(np.float64)
        self.numel = max(float(self.counts.sum()), 1.0)
        used = np.flatnonzero(self.counts.sum(axis=0))
        self.top = float(EDGES[min(int(used[-1]) + 1, 0x7F7)]) if used.size else 0.0  # no |x| lies above
        # A real vector fills a tenth of the bins: the others are left out of every pass.
        self._first = int(used[0]) if used.size else 0
        self._last = min(int(used[-1]), 0x7F7) if used.size else 0
        kept = slice(self._first, self._last + 1)
        low, high = EDGES[:-1][kept], EDGES[1:][kept]
        self._low, self._width = low, np.maximum(high - low, 1e-300)
        self._kept = c = self.counts[:, kept]
        total = c.sum(axis=0)
        self._cum0 = np.concatenate([np.zeros((c.shape[0], 1)), np.cumsum(c, axis=1)], axis=1)
        self._density = total / self._width
        self._moment1 = np.concatenate([[0.0], np.cumsum(total * (low + high) / 2)])
        self._moment2 = np.concatenate([[0.0], np.cumsum(total * (low * low + low * high + high * high) / 3)])
        self.energy = float(self._moment2[-1])
        self.rms = float(np.sqrt(self.energy / self.numel))

    def _integrals(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """F0 per block (blocks, m), F1 and F2 over all (m,), up to each threshold."""
        bins = np.clip(np.searchsorted(EDGES, t, side="right") - 1, self._first, self._last) - self._first
        low = self._low[bins]
        part = np.clip((t - low) / self._width[bins], 0.0, 1.0)
        f0 = self._cum0[:, bins] + self._kept[:, bins] * part
        t = np.clip(t, low, low + self._width[bins])
        f1 = self._moment1[bins] + self._density[bins] * (t * t - low * low) / 2
        f2 = self._moment2[bins] + self._density[bins] * (t**3 - low**3) / 3
        return f0, f1, f2

    def predict(self, step: float, theta: float) -> Prediction:
        """Bits and NMSE at one step (> 0) and rounding offset theta in (0, 1/2]."""
        if not self.energy:
            return Prediction(0.0, 0.0)
        highest = min(int(self.top / step + theta) + 1, MAX_SYMBOL + 1)
        m = np.arange(1, highest + 1)
        f0, f1, f2 = self._integrals(np.concatenate([[0.0], (m - theta) * step, [max(self.top, step)]]))
        mass = np.maximum(np.diff(f0, axis=1), 0.0)  # (blocks, symbols): |q| = 0, 1, ..., highest
        sizes = np.maximum(mass.sum(axis=1, keepdims=True), 1.0)
        p = mass / sizes
        used = mass > 0.5
        # the coder gives every used symbol at least 1/4096, which at low rates the zero symbol pays for
        f = np.where(used, np.maximum(p / self._signs(p.shape[1]), 1 / 4096), 1.0)
        total = np.where(used, f * self._signs(p.shape[1]), 0.0).sum(axis=1)
        plain = np.where(used, -p * np.log2(f), 0.0).sum(axis=1) + np.log2(np.maximum(total, 1.0))
        highest_used = np.where(used, np.arange(p.shape[1]), 0).max(axis=1)
        tables = _TABLE_BITS * (2 * highest_used + 1) + _BLOCK_BITS
        bits = float((plain * sizes[:, 0] + tables).sum()) / self.numel
        return Prediction(bits, self._distortion(step, np.diff(f0.sum(axis=0)), np.diff(f1), np.diff(f2)))

    @staticmethod
    def _signs(width: int) -> np.ndarray:
        """Symbols per magnitude: one for 0, two for the others."""
        return np.where(np.arange(width) == 0, 1.0, 2.0)

    def _distortion(self, step: float, n: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
        m = np.arange(n.size)
        levels = np.zeros(n.size)
        for exact in (1, 2):
            if n.size > exact and n[exact] > 0:
                levels[exact] = first[exact] / n[exact]
        if n.size > 3 and n[3:].sum() > 0:
            offset = (first[3:] - m[3:] * step * n[3:]).sum() / n[3:].sum()
            levels[3:] = m[3:] * step + offset
        error = (second - 2 * levels * first + levels**2 * n).sum()
        return float(max(error, 0.0) / self.energy)

    def smallest_step(self) -> float:
        """No symbol exceeds 127 at this step or a larger one."""
        return max(self.top / MAX_SYMBOL, 2.0**-120)

    def step_for_bits(self, bits: float, theta: float) -> float:
        """The step whose predicted rate is `bits`, to about 0.1 %; the smallest legal one if that needs
        fewer.

        The bisection runs on the sum of all blocks, which is cheap; adapting to each block saves a nearly
        constant number of bits, which a few full predictions find.
        """
        smallest = self.smallest_step()
        if self.predict(smallest, theta).bits <= bits:
            return smallest
        whole, saved = self._merged(), 0.0
        for _ in range(4):
            step = whole._bisect(bits + saved, theta)
            excess = self.predict(step, theta).bits - bits
            if abs(excess) <= 1e-3 * bits:
                break
            saved -= excess
        return max(step, smallest)

    def _bisect(self, bits: float, theta: float) -> float:
        """Regula falsi (Illinois) on log step, where the rate is nearly linear; ends within 0.05 % of
        `bits`."""

        def excess(at: float) -> float:
            return self.predict(float(np.exp(at)), theta).bits - bits

        low, high = float(np.log(self.smallest_step())), float(np.log(max(self.top, 2.0**-120) * 4))
        above, below = excess(low), excess(high)
        if above <= 0 or below >= 0:
            return float(np.exp(low if above <= 0 else high))
        for _ in range(40):
            middle = (low * below - high * above) / (below - above)
            found = excess(middle)
            if abs(found) <= 5e-4 * bits or high - low < 1e-6:
                break
            if found > 0:
                low, above, below = middle, found, below / 2
            else:
                high, below, above = middle, found, above / 2
        return float(np.exp(middle))

    def _merged(self) -> RateModel:
        return RateModel(self.counts.sum(axis=0, keepdims=True)) if self.counts.shape[0] > 1 else self

    def best_for_bits(self, bits: float, theta: float | None = None) -> tuple[float, float]:
        """(step, theta) for the rate; theta follows from the rate unless given."""
        if theta is None:
            theta = next(value for limit, value in THETAS if bits < limit)
        return self.step_for_bits(bits, theta), theta
