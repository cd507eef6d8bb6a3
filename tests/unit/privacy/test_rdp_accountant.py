"""The account of privacy against its definition, against closed forms, and against the package dp-accounting (F40)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from umbel.privacy.rdp import (
    ORDERS,
    epsilon_after,
    epsilon_of,
    gaussian_rdp,
    releases_within,
    sampled_gaussian_rdp,
)

# (q, z, releases, delta, epsilon) as computed by dp-accounting 0.6.0 (RdpAccountant with the orders of this module).
REFERENCE = [
    (1.0, 1.0, 1, 1e-5, 4.72842553386144),
    (1.0, 1.1, 50, 1e-5, 49.914139835714295),
    (1.0, 4.0, 100, 1e-6, 15.32798402653992),
    (1.0, 0.6, 3, 1e-5, 16.94620928001588),
    (1.0, 20.0, 10, 1e-6, 0.7002126957830125),
    (0.1, 1.0, 100, 1e-5, 7.903850223578231),
    (0.01, 1.1, 1000, 1e-5, 1.7117318714619834),
    (0.3, 2.0, 200, 1e-6, 14.00399502610115),
    (0.05, 0.7, 60, 1e-5, 7.681316561052597),
    (0.001, 0.8, 5000, 1e-6, 1.5918554557233795),
]


@pytest.mark.parametrize(("q", "z", "num", "delta", "want"), REFERENCE)
def test_f40_epsilon_is_that_of_dp_accounting(q, z, num, delta, want) -> None:
    """F40: within 1e-3, never above: that package rounds the sampled curve at fractional orders up a little."""
    got = epsilon_after([(q, z)] * num, delta)
    assert got == pytest.approx(want, rel=1e-3)
    assert got <= want * (1 + 1e-9)
    if q == 1.0:
        assert got == pytest.approx(want, rel=1e-12)


def test_f40_epsilon_is_that_of_dp_accounting_where_it_is_installed() -> None:
    dp_accounting = pytest.importorskip("dp_accounting", reason="its values are also in REFERENCE")
    from dp_accounting.rdp import RdpAccountant

    for z, num in ((0.8, 7), (2.5, 40), (9.0, 300)):
        other = RdpAccountant(orders=list(ORDERS))
        other.compose(dp_accounting.GaussianDpEvent(z), num)
        assert epsilon_after([(1.0, z)] * num, 1e-6) == pytest.approx(other.get_epsilon(1e-6), rel=1e-12)


def by_definition(q: float, z: float, order: float) -> float:
    """log E_{x ~ N(0, z)} [((1 - q) + q N(1, z)(x) / N(0, z)(x))^order] / (order - 1), by quadrature."""
    x = np.linspace(-30 * z, 30 * z + order, 400_001)
    log_ratio = (2 * x - 1) / (2 * z * z)
    log_mixture = np.logaddexp(np.log1p(-q), np.log(q) + log_ratio)
    log_density = -(x**2) / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi))
    exponent = log_density + order * log_mixture
    top = exponent.max()
    return (top + math.log(np.trapezoid(np.exp(exponent - top), x))) / (order - 1)


@pytest.mark.parametrize("order", [1.6, 2.0, 2.5, 3.0, 4.75, 9.9, 16.0, 40.0])
@pytest.mark.parametrize(("q", "z"), [(0.5, 4.0), (0.05, 0.7), (0.1, 1.0), (0.9, 2.0)])
def test_the_sampled_gaussian_is_its_definition(q, z, order) -> None:
    got = sampled_gaussian_rdp(q, z, order)
    if math.isinf(got):
        # An order that does not converge is given up, never guessed.
        assert order < 2
    else:
        assert got == pytest.approx(by_definition(q, z, order), rel=1e-8)


def exact_delta(z: float, epsilon: float) -> float:
    """The delta of one Gaussian release, exactly: Balle and Wang 2018, arXiv 1805.06530, Theorem 8."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return below(1 / (2 * z) - epsilon * z) - math.exp(epsilon) * below(-1 / (2 * z) - epsilon * z)


@pytest.mark.parametrize(("z", "num"), [(1.0, 1), (1.0, 10), (4.0, 100), (0.6, 3), (30.0, 50)])
def test_epsilon_is_above_the_exact_one_and_close(z, num) -> None:
    """`num` Gaussian releases are one of deviation z / sqrt(num): its epsilon is known in closed form."""
    delta = 1e-5
    got = epsilon_after([(1.0, z)] * num, delta)
    single = z / math.sqrt(num)
    assert exact_delta(single, got) <= delta
    assert exact_delta(single, got / 1.12) > delta


def test_the_limits_of_sampling() -> None:
    assert sampled_gaussian_rdp(0.0, 1.0, 8.0) == 0.0
    assert sampled_gaussian_rdp(1.0, 2.0, 8.0) == gaussian_rdp(2.0, 8.0) == 1.0
    assert sampled_gaussian_rdp(0.999999, 2.0, 8.0) == pytest.approx(1.0, rel=1e-4)
    assert sampled_gaussian_rdp(0.5, 0.0, 8.0) == math.inf
    for bad in ((-0.1, 2.0), (1.1, 2.0), (0.5, 1.0), (math.nan, 2.0)):
        with pytest.raises(ValueError):
            sampled_gaussian_rdp(bad[0], 1.0, bad[1])


def test_nothing_released_costs_nothing_and_no_noise_costs_everything() -> None:
    assert epsilon_after([], 1e-5) == 0.0
    assert epsilon_after([(1.0, 0.0)], 1e-5) == math.inf
    with pytest.raises(ValueError):
        epsilon_of([1.0], [2.0], 0.0)


def test_epsilon_grows_with_releases_and_falls_with_noise() -> None:
    by_num = [epsilon_after([(1.0, 2.0)] * n, 1e-5) for n in range(1, 30)]
    assert by_num == sorted(by_num) and len(set(by_num)) == len(by_num)
    by_noise = [epsilon_after([(1.0, z / 4)] * 5, 1e-5) for z in range(1, 60)]
    assert by_noise == sorted(by_noise, reverse=True)
    # Order of rounds and mixtures of kinds do not matter.
    mixed = [(1.0, 2.0), (0.1, 1.0)] * 3
    assert epsilon_after(mixed, 1e-5) == epsilon_after(sorted(mixed), 1e-5)


def test_how_many_releases_a_budget_holds() -> None:
    one = epsilon_after([(1.0, 2.0)], 1e-5)
    five = epsilon_after([(1.0, 2.0)] * 5, 1e-5)
    assert releases_within(five, 2.0, 1e-5, most=100) == 5
    assert releases_within(five * 0.999, 2.0, 1e-5, most=100) == 4
    assert releases_within(one * 0.999, 2.0, 1e-5, most=100) == 0
    assert releases_within(1e9, 2.0, 1e-5, most=100) == 100
