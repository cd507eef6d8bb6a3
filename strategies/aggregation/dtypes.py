"""Which of the three averaging rules a dtype falls under, and how one gets to float64 and back.

bfloat16 is not a subtype of `numpy.floating`, so `np.issubdtype` alone would treat it as opaque bytes.
"""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np

Kind = Literal["floating", "integer", "bool"]


def kind_of(dtype: np.dtype) -> Kind:
    """Return the averaging rule of a dtype; raises TypeError for complex, object and text dtypes."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return "bool"
    if dtype.kind in "iu":
        return "integer"
    if dtype.kind == "f" or dtype == np.dtype(ml_dtypes.bfloat16):
        return "floating"
    raise TypeError(
        f"Dtype {dtype.name!r} cannot be averaged. Allowed: floating (and bfloat16), integer, bool."
        " Leave the tensor out of the exchange."
    )


def all_finite(array: np.ndarray) -> bool:
    """True if no entry is NaN or infinite; integers and bools always are finite."""
    return kind_of(array.dtype) != "floating" or bool(np.isfinite(array).all())
