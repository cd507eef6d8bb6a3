"""One site's side of an exchange: the model shaped for the round, the frame completed, the update cut out.

    fit        rank, cores and side adapter of the round; layouts of both directions
    complete   + factors drawn from the run's seed (checked by hash), + factors that live on this site's disk
    outgoing   the tensors of the form up: factors, gain x core, a sketch, or one segment of the adapter
    start_of   what these were before, for a codec that sends changes
    kept       what must lie on this site's disk for a later round

The server says what travels (`umbel.exchange.Exchange`); nothing here chooses a method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compression import Layout
from compression.roles import role_for
from umbel.digest import short, state_crc
from umbel.errors import Refusal, RefusalKind
from umbel.exchange import CARRY_A, CORE, SKETCH_IN, SKETCH_OUT, SUFFIXES, A, B, Exchange
from umbel.models.lora import LoraSettings, scale_of
from umbel.models.state import numpy_dtype

GAIN = ".lora_B.gain"
OWN, KEPT, HELD = "own/", "kept/", "held/"


def layouts(site_model: Any, settings: LoraSettings, exchange: Exchange) -> tuple[Layout, Layout]:
    """Return the layouts of what comes down and what goes up; the model's own where nothing is said."""
    if exchange == Exchange():
        return site_model.layout, site_model.layout
    dtype = numpy_dtype(settings.dtype)
    down, up = (
        Layout.from_arrays(form.tensors(site_model.modules, dtype), role_for)
        for form in (exchange.down, exchange.up)
    )
    return down, up


def load(
    site_model: Any,
    settings: LoraSettings,
    exchange: Exchange,
    received: Mapping[str, np.ndarray],
    remembered: Mapping[str, np.ndarray],
    seed: int,
) -> None:
    """Shape the model for this round and write everything it starts from."""
    from umbel.models.reshape import set_carry, set_cores, set_rank
    from umbel.models.state import write_state

    model = site_model.model
    set_rank(model, settings, exchange.down.rank)
    set_cores(model, exchange.down.cores)
    set_carry(model, {n: a for n, a in received.items() if n.endswith((CARRY_A, ".carry_B"))})
    write_state(model, complete(site_model, settings, exchange, received, remembered, seed), "lora")


def complete(
    site_model: Any,
    settings: LoraSettings,
    exchange: Exchange,
    received: Mapping[str, np.ndarray],
    remembered: Mapping[str, np.ndarray],
    seed: int,
) -> dict[str, np.ndarray]:
    """Return factors (and cores) under the adapter's names; raises Refusal when a part cannot be had."""
    found = {n: a for n, a in received.items() if n.endswith((A, B, CORE))}
    if exchange.seeded:
        from umbel.models.seeded import seeded_factors

        drawn = seeded_factors(site_model.modules, settings, seed, exchange)
        if state_crc(drawn) != exchange.frozen_crc:
            raise Refusal(
                RefusalKind.REFUSED,
                f"the frozen factors drawn here are {short(state_crc(drawn))}, the server's are "
                f"{short(exchange.frozen_crc)}: the versions of numpy or the settings differ",
            )
        found.update(drawn)
    found.update(held(site_model, exchange, remembered))
    for m in site_model.modules:
        for factor in exchange.own:
            name = m.name + SUFFIXES[factor]
            shape = (m.rank, m.in_features) if factor == "A" else (m.out_features, m.rank)
            found[name] = remembered.get(OWN + name, np.zeros(shape, numpy_dtype(settings.dtype)))
        if exchange.down.cores:
            found[m.name + GAIN] = np.ones(exchange.down.cores, numpy_dtype(settings.dtype))
    if exchange.again:
        found.update({n.removeprefix(KEPT): a for n, a in remembered.items() if n.startswith(KEPT)})
        if not found:
            raise Refusal(
                RefusalKind.REFUSED,
                "the first stage of this round was not done here; waiting for the next round",
            )
    return found


def held(site_model: Any, exchange: Exchange, remembered: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the factors this site was not sent because it has them; raises Refusal when it has other ones."""
    names = [m.name + SUFFIXES[f] for m in site_model.modules for f in exchange.stored]
    found = {n: remembered[HELD + n] for n in names if HELD + n in remembered}
    if names and (len(found) < len(names) or state_crc(found) != exchange.frozen_crc):
        raise Refusal(
            RefusalKind.REFUSED,
            "the frozen factors of the last round are not here any more; they must be sent again",
        )
    return found


def outgoing(
    site_model: Any,
    settings: LoraSettings,
    exchange: Exchange,
    trained: Mapping[str, np.ndarray],
    received: Mapping[str, np.ndarray],
    seed: int,
) -> dict[str, np.ndarray]:
    """Return the tensors that go up, from the trained state; `received` holds the basis a sketch projects on."""
    if exchange == Exchange():
        return dict(trained)
    found = dict(trained)
    for m in site_model.modules:
        if m.name + CORE in found:
            gain = found[m.name + GAIN].astype(np.float64)[:, None, None]
            core = found[m.name + CORE]
            found[m.name + CORE] = (gain * core.astype(np.float64)).astype(core.dtype)
        if exchange.up.sketch:
            found.update(_sketch(m, settings, exchange, found, received, seed))
    return exchange.up.pick(found, site_model.modules)


def start_of(
    site_model: Any,
    settings: LoraSettings,
    exchange: Exchange,
    received: Mapping[str, np.ndarray],
    remembered: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return what a change is taken against, as the server knows it too: zero for a tensor without a past."""
    if exchange == Exchange():
        return dict(received)
    up = exchange.up.tensors(site_model.modules, numpy_dtype(settings.dtype))
    segment = exchange.up.pick(received, site_model.modules) if exchange.up.part[1] else {}
    return {**up, **received, **held(site_model, exchange, remembered), **segment}


def _sketch(
    module: Any,
    settings: LoraSettings,
    exchange: Exchange,
    trained: Mapping[str, np.ndarray],
    received: Mapping[str, np.ndarray],
    seed: int,
) -> dict[str, np.ndarray]:
    a, b = (trained[module.name + x].astype(np.float64) for x in (A, B))
    scale = scale_of(settings, module.name)
    if exchange.up.sketch_side == "out":
        from umbel.models.seeded import probe

        columns = min(exchange.up.sketch, module.in_features, module.out_features)
        omega = probe(seed, exchange.probe, module.name, module.in_features, columns)
        return {module.name + SKETCH_OUT: (scale * (b @ (a @ omega))).astype(np.float32)}
    basis = received[module.name + SKETCH_OUT].astype(np.float64)
    return {module.name + SKETCH_IN: (scale * (a.T @ (b.T @ basis))).astype(np.float32)}


def kept(exchange: Exchange, trained: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the trained tensors that stay on this site's disk."""
    found = {}
    for prefix, factors in ((OWN, exchange.own), (HELD, exchange.hold)):
        suffixes = tuple(SUFFIXES[f] for f in factors)
        found.update({prefix + n: a for n, a in trained.items() if suffixes and n.endswith(suffixes)})
    if exchange.keep:
        found.update({KEPT + n: a for n, a in trained.items()})
    return found
