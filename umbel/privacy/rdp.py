"""How much privacy Gaussian noise costs: Renyi differential privacy and its conversion to (epsilon, delta).

    Gaussian, sensitivity 1, deviation z     RDP(a) = a / (2 z^2)                               [1] Prop. 7
    sampled Gaussian, integer order a        RDP(a) = log A / (a - 1),                          [2] Sec. 3.3
        A = sum_k C(a, k) (1-q)^(a-k) q^k exp((k^2 - k) / (2 z^2))
    sampled Gaussian, any order a            A = sum_i C(a, i) (L_i + R_i),                     [2] Sec. 3.3
        L_i = (1-q)^(a-i) q^i exp((i^2 - i) / (2 z^2)) erfc((i - c) / (sqrt(2) z)) / 2
        R_i = (1-q)^i q^(a-i) exp((j^2 - j) / (2 z^2)) erfc((c - j) / (sqrt(2) z)) / 2,  j = a - i
        c   = z^2 log(1/q - 1) + 1/2
    composition                              RDP adds over releases                             [1] Prop. 1
    conversion                               eps = RDP(a) + log((a-1)/a) - log(a delta) / (a-1) [3] Prop. 12
                                             the smallest over the orders

q is the chance with which a site takes part, drawn independently for each (Poisson); with q = 1 the first line is
exact. Sampling without replacement and a quorum that looks at the sample are *not* Poisson sampling: for those use
q = 1. The result is an upper bound; the true epsilon of the same noise is a few per cent lower.

[1] Mironov 2017, arXiv 1702.07476. [2] Mironov, Talwar, Zhang 2019, arXiv 1908.10530. [3] Canonne, Kamath, Steinke
2020, arXiv 2004.00010.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Fine where the optimum usually lies, then coarser: very much noise needs high orders, very little low ones.
ORDERS: tuple[float, ...] = (
    *(1.0 + x / 20 for x in range(1, 200)),
    *(float(x) for x in range(11, 65)),
    *(float(round(64 * 1.1**x)) for x in range(1, 60)),
)
# Terms of the two infinite sums are dropped once they are smaller than e^-30 of the largest one. Low orders converge
# slowly; one that has not by then is left out, which can only raise epsilon.
_NEGLIGIBLE = -30.0
_MAX_TERMS = 1_000


def gaussian_rdp(noise_multiplier: float, order: float) -> float:
    """Return the RDP of one Gaussian release; `noise_multiplier` z = deviation / sensitivity; infinity for z = 0."""
    return math.inf if noise_multiplier <= 0 else order / (2 * noise_multiplier**2)


def sampled_gaussian_rdp(sampling: float, noise_multiplier: float, order: float) -> float:
    """Return the RDP of one release to which each site contributes with chance `sampling`, in [0, 1].

    `order` > 1. Raises ValueError outside those ranges.
    """
    if not 0.0 <= sampling <= 1.0 or order <= 1.0:
        raise ValueError(f"sampling {sampling!r} must be in [0, 1] and order {order!r} > 1")
    if sampling == 0.0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    if sampling == 1.0:
        return gaussian_rdp(noise_multiplier, order)
    moment = (
        _log_moment_integer(sampling, noise_multiplier, int(order))
        if order.is_integer()
        else _log_moment_fractional(sampling, noise_multiplier, order)
    )
    # Rounding may leave a hair below zero where the true value is zero.
    return max(0.0, moment) / (order - 1)


def epsilon_of(rdp: Sequence[float], orders: Sequence[float], delta: float) -> float:
    """Return the smallest epsilon for which the RDP curve implies (epsilon, delta); infinity when none does."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta {delta!r} must be in (0, 1)")
    found = [
        cost + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order, cost in zip(orders, rdp, strict=True)
        if math.isfinite(cost)
    ]
    return max(0.0, min(found, default=math.inf))


def epsilon_after(releases: Sequence[tuple[float, float]], delta: float) -> float:
    """Return epsilon after releases given as (sampling, noise multiplier); 0 for none."""
    if not releases:
        return 0.0
    # Rounds of one run are alike: the curve is computed once for each kind.
    kinds: dict[tuple[float, float], int] = {}
    for release in releases:
        kinds[release] = kinds.get(release, 0) + 1
    total = [
        sum(num * sampled_gaussian_rdp(q, z, order) for (q, z), num in sorted(kinds.items()))
        for order in ORDERS
    ]
    return epsilon_of(total, ORDERS, delta)


def releases_within(budget: float, noise_multiplier: float, delta: float, *, most: int) -> int:
    """Return how many releases (q = 1) fit into `budget`, at most `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        rdp = [middle * gaussian_rdp(noise_multiplier, order) for order in ORDERS]
        low, high = (middle, high) if epsilon_of(rdp, ORDERS, delta) <= budget else (low, middle - 1)
    return low


def _log_moment_integer(q: float, z: float, order: int) -> float:
    logs = [
        _log_binomial(order, k)[1]
        + k * math.log(q)
        + (order - k) * math.log1p(-q)
        + (k * k - k) / (2 * z * z)
        for k in range(order + 1)
    ]
    return _log_sum([(1.0, value) for value in logs])


def _log_moment_fractional(q: float, z: float, order: float) -> float:
    centre = z * z * math.log(1 / q - 1) + 0.5
    terms: list[tuple[float, float]] = []
    top = -math.inf
    for i in range(_MAX_TERMS):
        sign, log_binomial = _log_binomial(order, i)
        j = order - i
        left = i * math.log(q) + j * math.log1p(-q) + (i * i - i) / (2 * z * z)
        left += _log_erfc((i - centre) / (math.sqrt(2) * z)) - math.log(2)
        right = j * math.log(q) + i * math.log1p(-q) + (j * j - j) / (2 * z * z)
        right += _log_erfc((centre - j) / (math.sqrt(2) * z)) - math.log(2)
        terms += [(sign, log_binomial + left), (sign, log_binomial + right)]
        top = max(top, terms[-1][1], terms[-2][1])
        if i > order and max(terms[-1][1], terms[-2][1]) < top + _NEGLIGIBLE:
            return _log_sum(terms)
    return math.inf


def _log_binomial(order: float, k: int) -> tuple[float, float]:
    """Return (sign, log |C(order, k)|) for a real order > 0; the sign alternates beyond the order."""
    above = order - k + 1
    if above > 0:
        return 1.0, math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(above)
    # Gamma of a negative number: C(a, k) changes its sign with every k > a + 1.
    sign = 1.0 if math.floor(above) % 2 == 0 else -1.0
    return sign, math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(above)


def _log_erfc(x: float) -> float:
    if x < 20.0:
        return math.log(math.erfc(x))
    # erfc underflows soon: its asymptotic series, relative error below 1e-10 from 20 on.
    square = 1 / (x * x)
    series = 1 - square / 2 + 3 * square**2 / 4 - 15 * square**3 / 8
    return -x * x - math.log(x * math.sqrt(math.pi)) + math.log(series)


def _log_sum(terms: Sequence[tuple[float, float]]) -> float:
    """Return log of sum sign * e^value; minus infinity for a sum that is not positive."""
    top = max(value for _, value in terms)
    total = math.fsum(sign * math.exp(value - top) for sign, value in terms)
    return top + math.log(total) if total > 0 else -math.inf
