"""Outer steps in one pass over memory: compiled loops with the same bits as the numpy blocks they replace.

    d = average - x       m = mu v - d       x <- x - lr (mu m - d  if nesterov else  m)       v <- m

reads x, average and v and writes x and v once: 20 bytes a parameter in float32, which is what memory allows. All
arithmetic is float64, one rounding at each store, no fused multiply-add: equal to `strategies.aggregation.outer` bit
for bit (a test compares them). Only contiguous float32 goes through here; where numba is missing, or for short
tensors, the numpy blocks remain.
"""

from __future__ import annotations

import numpy as np

from compression.kernels import has_numba
from compression.kernels.jit import kernel

# Below this a compiled loop saves less than the call costs.
MIN_NUMEL = 1 << 15


def usable(*arrays: np.ndarray) -> bool:
    """Tell whether the compiled loops take these arrays."""
    return (
        arrays[0].size >= MIN_NUMEL
        and all(a.dtype == np.float32 and a.flags.c_contiguous and a.ndim == 1 for a in arrays)
        and has_numba()
    )


@kernel("void(float32[::1], in:float32, float32[::1], float64, float64)")
def _nesterov(x, average, v, lr, mu):
    for i in range(x.size):
        old = np.float64(x[i])
        d = np.float64(average[i]) - old
        m = mu * np.float64(v[i]) - d
        x[i] = np.float32(old + -lr * (mu * m - d))
        v[i] = np.float32(m)


@kernel("void(float32[::1], in:float32, float32[::1], float64, float64)")
def _heavy_ball(x, average, v, lr, mu):
    for i in range(x.size):
        old = np.float64(x[i])
        m = mu * np.float64(v[i]) - (np.float64(average[i]) - old)
        x[i] = np.float32(old + -lr * m)
        v[i] = np.float32(m)


@kernel("void(float32[::1], in:float32, float64)")
def _plain(x, average, lr):
    for i in range(x.size):
        old = np.float64(x[i])
        x[i] = np.float32(old + lr * (np.float64(average[i]) - old))


@kernel(
    "void(float32[::1], in:float32, float32[::1], float32[::1], float64, float64, float64, float64, boolean)"
)
def _adaptive(x, average, first, second, lr, beta1, beta2, tau, yogi):
    for i in range(x.size):
        old = np.float64(x[i])
        d = np.float64(average[i]) - old
        square = d * d
        m = beta1 * np.float64(first[i]) + (1.0 - beta1) * d
        v = np.float64(second[i])
        if yogi:
            v = v - (1.0 - beta2) * square * np.sign(v - square)
        else:
            v = beta2 * v + (1.0 - beta2) * square
        below = np.sqrt(v) + tau
        if below > 0.0:
            x[i] = np.float32(old + lr * (m / below))
        first[i] = np.float32(m)
        second[i] = np.float32(v)


def sgd(x: np.ndarray, average: np.ndarray, v: np.ndarray, lr: float, mu: float, nesterov: bool) -> None:
    """Momentum SGD on the pseudo-gradient x - average; `x` and `v` [n] float32 are changed in place."""
    (_nesterov if nesterov else _heavy_ball)(x, average, v, lr, mu)


def plain(x: np.ndarray, average: np.ndarray, lr: float) -> None:
    """x <- x + lr (average - x), `x` [n] float32 in place."""
    _plain(x, average, lr)


def adaptive(
    x: np.ndarray,
    average: np.ndarray,
    moments: tuple[np.ndarray, np.ndarray],
    lr: float,
    betas: tuple[float, float],
    tau: float,
    yogi: bool,
) -> None:
    """FedAdam or FedYogi; `x` and both `moments` [n] float32 are changed in place."""
    _adaptive(x, average, *moments, lr, *betas, tau, yogi)


@kernel("void(float32[::1], in:float64, float32[::1], float64, float64, boolean)")
def _sgd_delta(x, delta, v, lr, mu, nesterov):
    for i in range(x.size):
        d = delta[i]
        m = mu * np.float64(v[i]) - d
        step = mu * m - d if nesterov else m
        x[i] = np.float32(np.float64(x[i]) + -lr * step)
        v[i] = np.float32(m)


@kernel("void(float32[::1], in:float64, float64)")
def _plain_delta(x, delta, lr):
    for i in range(x.size):
        x[i] = np.float32(np.float64(x[i]) + lr * delta[i])


def sgd_delta(
    x: np.ndarray, delta: np.ndarray, v: np.ndarray | None, lr: float, mu: float, nesterov: bool
) -> None:
    """As `sgd` with the merged delta [n] float64 itself in place of the average; `v` is None without momentum."""
    if has_numba() and x.size >= MIN_NUMEL:
        if v is None:
            _plain_delta(x, delta, lr)
        else:
            _sgd_delta(x, delta, v, lr, mu, nesterov)
        return
    if v is None:
        x[:] = x.astype(np.float64) + lr * delta
        return
    m = mu * v.astype(np.float64) - delta
    x[:] = x.astype(np.float64) + -lr * (mu * m - delta if nesterov else m)
    v[:] = m
