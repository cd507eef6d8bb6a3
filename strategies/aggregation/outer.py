"""Server optimisers: what the server does with the average of the sites.

With D = average - x (the mean delta; minus D is the pseudo-gradient g):

    sgd      b <- mu b + g;        x <- x - lr (g + mu b  if nesterov else  b)          as torch.optim.SGD
    fedavgm  sgd with momentum, no Nesterov                                             arXiv 1909.06335
    adam     m <- b1 m + (1-b1) D;  v <- b2 v + (1-b2) D^2;   x <- x + lr m / (sqrt(v) + tau)
    yogi     as adam with           v <- v - (1-b2) D^2 sign(v - D^2)
    adagrad  as adam with           v <- v + D^2

Adaptive rules: Reddi et al. 2021, "Adaptive federated optimization", arXiv 2003.00295, algorithm 2: v starts
at tau^2 and there is no bias correction. DiLoCo's outer step is sgd with lr 0.7, momentum 0.9, Nesterov
(Douillard et al. 2023, arXiv 2311.08105).

Adapter deltas are 1e-5 to 1e-3, so a fixed tau = 1e-3 drowns sqrt(v) and tau = 1e-8 makes every coordinate
move by lr: `tau="median"` takes the median |D| of the first step, apart for the A factors, the B factors and
the rest.

Buffers (running statistics), integers and bools are not parameters: they take the average as it is. A tensor
that is missing from the average keeps its value *and* its moments. Do not use these rules on factors that are
re-based every round (SVD rules): the moments would live in the old basis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from strategies.aggregation import fused
from strategies.aggregation.dtypes import all_finite, kind_of
from strategies.aggregation.errors import UpdateError
from umbel.errors import ConfigError

BLOCK = 1 << 18
_BUFFERS = (".running_mean", ".running_var", "running_mean", "running_var")
_GROUPS = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B"}


def is_running_statistic(name: str) -> bool:
    """True for the running mean and variance of normalisation layers."""
    return name.endswith(_BUFFERS)


class ServerOptimizer:
    """Base: walks over the tensors in blocks, keeps the state, knows nothing about a rule.

    State arrays are `state_dtype`, maths float64. `is_buffer` decides by name what is averaged only.
    """

    slots: tuple[str, ...] = ()

    def __init__(
        self,
        lr: float,
        *,
        is_buffer: Callable[[str], bool] = is_running_statistic,
        state_dtype: Any = np.float32,
    ) -> None:
        _require("lr", lr, lr > 0, "> 0")
        self.lr, self._is_buffer, self._dtype = float(lr), is_buffer, np.dtype(state_dtype)
        self._state: dict[str, np.ndarray] = {}

    def step(self, params: Mapping[str, np.ndarray], average: Mapping[str, np.ndarray]) -> None:
        """Move `params` in place towards `average` (values, not deltas), tensor by tensor, block by block.

        Everything is checked before anything changes. Raises UpdateError for an unknown name, a wrong shape
        or a value that is not finite, and ValueError for a parameter that cannot be written in place.
        """
        for name, target in average.items():
            _check(name, params, target)
        self._before(params, average)
        for name, target in average.items():
            value = params[name]
            if kind_of(value.dtype) != "floating" or self._is_buffer(name):
                value[...] = target
            else:
                self._walk(name, value.reshape(-1), np.ascontiguousarray(target).reshape(-1))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all state as arrays, "<slot>/<tensor name>"; enough for a bit-exact resume."""
        return {key: value.copy() for key, value in self._state.items()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the state. Raises ConfigError for a slot that this rule does not have."""
        for key in state:
            if key.split("/", 1)[0] not in self.slots:
                raise ConfigError(
                    "server optimiser state",
                    "belongs to another rule",
                    got=key,
                    allowed=", ".join(self.slots) or "nothing",
                    remedy="Resume with the optimiser the run was started with.",
                )
        self._state = {key: np.array(value) for key, value in state.items()}

    def _before(self, params: Mapping[str, np.ndarray], average: Mapping[str, np.ndarray]) -> None:
        """Hook for what a rule must know before the first block."""

    def _initial(self, slot: str, name: str) -> float:
        return 0.0

    def _update(self, name: str, delta: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        """Return what is added to x for one float64 block; `state` blocks are replaced by new arrays."""
        raise NotImplementedError

    def _fused(self, name: str, value: np.ndarray, target: np.ndarray, slots: dict[str, np.ndarray]) -> bool:
        """Do the same in one compiled pass; False where a rule has none."""
        return False

    def _walk(self, name: str, value: np.ndarray, target: np.ndarray) -> None:
        slots = {slot: self._slot(slot, name, value.size) for slot in self._tensor_slots()}
        if fused.usable(value, target, *slots.values()) and self._fused(name, value, target, slots):
            return
        for at in range(0, value.size, BLOCK):
            part = slice(at, at + BLOCK)
            old = value[part].astype(np.float64)
            state = {slot: array[part].astype(np.float64) for slot, array in slots.items()}
            value[part] = old + self._update(name, target[part].astype(np.float64) - old, state)
            for slot, array in slots.items():
                array[part] = state[slot]

    def _tensor_slots(self) -> tuple[str, ...]:
        return tuple(slot for slot in self.slots if slot != "tau")

    def _slot(self, slot: str, name: str, size: int) -> np.ndarray:
        key = f"{slot}/{name}"
        if key not in self._state:
            self._state[key] = np.full(size, self._initial(slot, name), self._dtype)
        if self._state[key].shape != (size,):
            raise UpdateError(
                key, "does not fit its tensor", got=self._state[key].shape, allowed=f"({size},)"
            )
        return self._state[key]


class SGD(ServerOptimizer):
    """Stochastic gradient descent on the pseudo-gradient, as torch.optim.SGD without dampening.

    lr 1 and momentum 0 return the average itself.
    """

    slots = ("momentum",)

    def __init__(
        self, lr: float = 1.0, momentum: float = 0.0, nesterov: bool = False, **options: Any
    ) -> None:
        super().__init__(lr, **options)
        _require("momentum", momentum, 0 <= momentum < 1, "[0, 1)")
        _require("nesterov", nesterov, not nesterov or momentum > 0, "False, or True with momentum > 0")
        self.momentum, self.nesterov = float(momentum), nesterov

    def step(self, params: Mapping[str, np.ndarray], average: Mapping[str, np.ndarray]) -> None:
        """As the base; plain averaging copies the average instead of adding x + (average - x)."""
        if self.momentum == 0.0 and self.lr == 1.0:
            for name, target in average.items():
                _check(name, params, target)
            for name, target in average.items():
                params[name][...] = target
            return
        super().step(params, average)

    def is_buffer(self, name: str) -> bool:
        """Tell whether a tensor is averaged only."""
        return self._is_buffer(name)

    def momentum_of(self, name: str, size: int) -> np.ndarray:
        """Return the live momentum [size] of a tensor, zero at first."""
        return self._slot("momentum", name, size)

    def _tensor_slots(self) -> tuple[str, ...]:
        return self.slots if self.momentum else ()

    def _fused(self, name: str, value: np.ndarray, target: np.ndarray, slots: dict[str, np.ndarray]) -> bool:
        if self.momentum:
            fused.sgd(value, target, slots["momentum"], self.lr, self.momentum, self.nesterov)
        else:
            fused.plain(value, target, self.lr)
        return True

    def _update(self, name: str, delta: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        if not self.momentum:
            return self.lr * delta
        state["momentum"] = self.momentum * state["momentum"] - delta
        gradient = state["momentum"]
        return -self.lr * (self.momentum * gradient - delta if self.nesterov else gradient)


def fedavgm(lr: float = 1.0, momentum: float = 0.9, **options: Any) -> SGD:
    """Return server momentum: v <- momentum v + D, x <- x + lr v (Hsu, Qi, Brown 2019, arXiv 1909.06335)."""
    return SGD(lr, momentum, **options)


class Adaptive(ServerOptimizer):
    """FedAdam, FedYogi or FedAdagrad, by `rule`; `tau` is a number > 0 or "median"."""

    slots = ("m", "v", "tau")

    def __init__(
        self,
        rule: Literal["adam", "yogi", "adagrad"],
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float | Literal["median"] = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(lr, **options)
        _require("rule", rule, rule in ("adam", "yogi", "adagrad"), "'adam', 'yogi', 'adagrad'")
        _require("betas", betas, len(betas) == 2 and all(0 <= b < 1 for b in betas), "two numbers in [0, 1)")
        number = isinstance(tau, (int, float)) and not isinstance(tau, bool) and tau > 0
        _require("tau", tau, tau == "median" or number, "a number > 0, or 'median'")
        self.rule, self.betas, self.tau = rule, betas, tau

    def _before(self, params: Mapping[str, np.ndarray], average: Mapping[str, np.ndarray]) -> None:
        if self.tau != "median":
            return
        names = [n for n in average if kind_of(params[n].dtype) == "floating" and not self._is_buffer(n)]
        for group in ("A", "B", "rest"):
            members = [n for n in names if _group(n) == group]
            if members and f"tau/{group}" not in self._state:
                tau = median_absolute_delta(params, average, members)
                # All zero (B never trained yet): wait for the first step that moves.
                if tau > 0:
                    self._state[f"tau/{group}"] = np.array(tau)

    def _tau(self, name: str) -> float:
        if self.tau != "median":
            return float(self.tau)
        return float(self._state.get(f"tau/{_group(name)}", 0.0))

    def _initial(self, slot: str, name: str) -> float:
        return self._tau(name) ** 2 if slot == "v" else 0.0

    def _fused(self, name: str, value: np.ndarray, target: np.ndarray, slots: dict[str, np.ndarray]) -> bool:
        if self.rule == "adagrad":
            return False
        moments = (slots["m"], slots["v"])
        fused.adaptive(value, target, moments, self.lr, self.betas, self._tau(name), self.rule == "yogi")
        return True

    def _update(self, name: str, delta: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        (beta1, beta2), square, v = self.betas, delta**2, state["v"]
        state["m"] = beta1 * state["m"] + (1 - beta1) * delta
        if self.rule == "adam":
            state["v"] = beta2 * v + (1 - beta2) * square
        elif self.rule == "yogi":
            state["v"] = v - (1 - beta2) * square * np.sign(v - square)
        else:
            state["v"] = v + square
        below = np.sqrt(state["v"]) + self._tau(name)
        return self.lr * np.divide(state["m"], below, out=np.zeros_like(below), where=below > 0)


def median_absolute_delta(
    params: Mapping[str, np.ndarray], average: Mapping[str, np.ndarray], names: Iterable[str]
) -> float:
    """Return the median over `names` of |average - params|, over the entries that moved; 0.0 if none did."""
    parts = [np.abs(average[n].astype(np.float64) - params[n].astype(np.float64)).ravel() for n in names]
    moved = np.concatenate(parts) if parts else np.zeros(0)
    moved = moved[moved > 0]
    return float(np.median(moved)) if moved.size else 0.0


def fednova_factors(weights: Iterable[float], num_steps: Iterable[int]) -> np.ndarray:
    """Return f [n] with x + sum_i p_i f_i delta_i the FedNova step for unequal local steps t_i.

    f_i = t_eff / t_i, t_eff = sum_i p_i t_i, p_i = w_i / sum w (Wang et al. 2020, arXiv 2007.07481, for plain
    local SGD). Equal steps give ones. Raises ConfigError for a site without steps or weights of sum 0.
    """
    shares, steps = np.array(list(weights), np.float64), np.array(list(num_steps), np.float64)
    _require("num_steps", steps.tolist(), steps.shape == shares.shape and bool((steps > 0).all()), "> 0 each")
    _require("weights", shares.tolist(), bool((shares >= 0).all()) and shares.sum() > 0, ">= 0, not all 0")
    return float(shares @ steps) / float(shares.sum()) / steps


def _group(name: str) -> str:
    return next((group for suffix, group in _GROUPS.items() if name.endswith(suffix)), "rest")


def _check(name: str, params: Mapping[str, np.ndarray], target: np.ndarray) -> None:
    if name not in params:
        raise UpdateError(name, "is not a tensor of this model", allowed="the names of the server's state")
    value = params[name]
    if value.shape != target.shape:
        raise UpdateError(name, "has the wrong shape", got=target.shape, allowed=str(value.shape))
    if not all_finite(target):
        raise UpdateError(name, "holds a NaN or an infinite value", remedy="Go back to the last commit.")
    if not (value.flags.c_contiguous and value.flags.writeable):
        raise ValueError(f"{name} must be C-contiguous and writeable to be updated in place. Pass a copy.")


def _require(key: str, got: Any, condition: bool, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"outer.{key}", "is out of range", got=got, allowed=allowed)
