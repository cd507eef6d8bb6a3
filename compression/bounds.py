"""What a codec promises about its error; the property tests hold each codec to its promise.

Contractive(delta)  ||C(x)-x||^2 <= (1-delta) ||x||^2      may carry a residual
Unbiased(omega)     E C(x) = x, E||C(x)-x||^2 <= omega ||x||^2   must not carry one
Absolute(eps)       max |C(x)-x| <= eps                    eps is only known once the step is
Exact()             bits equal
NoBound(why)        no promise (clipping formats): offered for interoperation only
References: Karimireddy et al. 2019 (contractive), Alistarh et al. 2017 (unbiased).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contractive:
    delta: float


@dataclass(frozen=True)
class Unbiased:
    omega: float


@dataclass(frozen=True)
class Absolute:
    """`eps` is None while the step is only requested by rate. `contractive` tells whether a residual may be
    kept."""

    eps: float | None = None
    contractive: bool = True


@dataclass(frozen=True)
class Exact:
    pass


@dataclass(frozen=True)
class NoBound:
    why: str


Bound = Contractive | Unbiased | Absolute | Exact | NoBound


def may_carry_residual(bound: Bound) -> bool:
    """Error feedback is sound for contractive codecs only (and pointless for exact ones)."""
    return isinstance(bound, Contractive) or (isinstance(bound, Absolute) and bound.contractive)
