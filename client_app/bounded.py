"""The site's own bound on an update: its norm, and noise, whatever the code that made it did.

    d = what leaves - what came        |d| <= C  or  d := d * C / |d|        then  d := d + N(0, s^2) a coordinate

|d| is the L2 norm over all floating tensors, in float64; a tensor that never came counts from zero. The noise is
drawn from the operating system's entropy, never from a seed that the server knows. Clipping and noise need an exact
codec on the way up: a lossy one has encoded the change already, and its residual would put back what was cut off.
It gives no privacy budget: what a noise of s is worth depends on C, on the number of sites and rounds, and on the
server's sampling.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import compression
from client_app.sent import kept_layout
from compression.frame import FrameHeader, read_header
from compression.layout import FLOAT_DTYPES, Layout
from compression.payload import is_exact
from umbel.errors import Refusal, RefusalKind
from umbel.policy import Update


def bound_update(
    rules: Update, frame: bytes, received: bytes | None, folder: Path
) -> tuple[bytes, dict[str, float]]:
    """Return the frame that may leave and what was done to it ({"norm", "clipped_to", "noise_std"}).

    `folder` holds the layouts that frames name. Raises Refusal POLICY when the norm is over the bound and must not be
    clipped, or when the frame cannot be read here.
    """
    if not rules.max_norm and not rules.noise_std:
        return frame, {}
    header = read_header(frame)
    values, layout = _decoded(frame, header, folder)
    exact = is_exact(header.policy)
    base = _base(received, folder) if exact and received is not None else {}
    change = _change(values, base, layout)
    norm = math.sqrt(sum(float(np.vdot(d, d)) for d in change.values()))
    done = {"norm": norm}
    excess = bool(rules.max_norm) and not norm <= rules.max_norm
    if excess and (rules.on_excess == "refuse" or not math.isfinite(norm)):
        raise Refusal(
            RefusalKind.POLICY,
            f"the update's norm is {norm:.4g}, the site allows update.max-norm = {rules.max_norm:g}",
        )
    if not excess and not rules.noise_std:
        return frame, done
    if not exact:
        raise Refusal(
            RefusalKind.POLICY,
            f"the site clips and adds noise itself and needs an exact codec, not {header.policy[:60]!r}",
        )
    factor = rules.max_norm / norm if excess else 1.0
    draw = np.random.Generator(np.random.Philox(secrets.randbits(128)))
    for name, delta in change.items():
        noisy = delta * factor + (draw.normal(0.0, rules.noise_std, delta.shape) if rules.noise_std else 0.0)
        start = base[name].astype(np.float64) if name in base else 0.0
        values[name] = (start + noisy).astype(values[name].dtype)
    if excess:
        done["clipped_to"] = rules.max_norm
    if rules.noise_std:
        done["noise_std"] = rules.noise_std
    again = compression.encode(
        values, layout, header.policy, seed=header.seed, round_index=header.round_index, base=header.base
    )
    return bytes(again), done


def _base(received: bytes, folder: Path) -> dict[str, np.ndarray]:
    header = read_header(received)
    if not is_exact(header.policy):
        raise Refusal(
            RefusalKind.POLICY,
            "the state came as a change, so that the update's norm cannot be checked here; compression.down",
        )
    return _decoded(received, header, folder)[0]


def _decoded(frame: bytes, header: FrameHeader, folder: Path) -> tuple[dict[str, np.ndarray], Layout]:
    layout = kept_layout(folder, header.layout_digest)
    if layout is None:
        raise Refusal(
            RefusalKind.POLICY,
            "the names of the tensors in this frame are not known here; the update's norm cannot be checked",
        )
    return dict(compression.decode(frame, layout)), layout


def _change(
    values: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray], layout: Layout
) -> dict[str, np.ndarray]:
    change = {}
    for entry in layout.entries:
        if entry.dtype in FLOAT_DTYPES:
            wide = values[entry.name].astype(np.float64)
            change[entry.name] = wide - base[entry.name].astype(np.float64) if entry.name in base else wide
    return change
