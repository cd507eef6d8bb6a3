"""What a run will move and hold, before it runs: bytes a round and site, parameters, memory.

The tensors come from `umbel.methods`, the table that the run itself obeys, with shapes from the model on the meta
device: no weight is loaded. Bytes of a `Plan` are those of the exact codec (raw tensors and one frame header); the
command asks `server_app.byte_plan`, in a process of its own, for the frames of the configured codecs. Memory at a site
is base, adapter, gradients, AdamW's moments and side adapter, without activations.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from umbel.config import Config, resolve, to_flat
from umbel.errors import UmbelError
from umbel.exchange import Exchange, Form
from umbel.methods import PERSONAL, STAGES, exchange_of, rank_of_site, site_ranks
from umbel.telemetry import units

# Header, digest and checksum of a frame, and the base's name.
FRAME_BYTES = 266


class Plan:
    """Sizes of one configuration; `sites` are the names of the cohort."""

    def __init__(self, config: Config, sites: Sequence[str]) -> None:
        from umbel.models.adapter import adapted_modules, attach
        from umbel.models.described import described
        from umbel.models.source import meta_model
        from umbel.models.state import numpy_dtype, state_tensors

        self.config, self.sites = config, list(sites)
        spec, settings = described(config)
        model = meta_model(spec)
        self.base_bytes = sum(
            t.numel() * t.element_size() for t in {id(p): p for p in model.parameters()}.values()
        )
        self.dtype = numpy_dtype(settings.dtype)
        if config.train.mode == "lora":
            model = attach(model, settings)
            self.modules = adapted_modules(model)
        else:
            self.modules = []
        tensors = state_tensors(model, config.train.mode)
        # Shapes and dtypes: all share one zero and take no memory.
        self.state = {
            name: np.broadcast_to(
                np.zeros((), numpy_dtype(str(t.dtype).removeprefix("torch."))), tuple(t.shape)
            )
            for name, t in tensors.items()
        }
        self.trainable = sum(a.size for a in self.state.values())
        self.state_bytes = sum(a.nbytes for a in self.state.values())
        self.room = max((min(m.in_features, m.out_features) for m in self.modules), default=0)
        self._known: dict[Form, int] = {}

    def size(self, form: Form) -> int:
        """Return the bytes of one frame of this form."""
        if not self.modules or form == Form():
            return self.state_bytes + FRAME_BYTES
        if form not in self._known:
            self._known[form] = (
                sum(a.nbytes for a in form.tensors(self.modules, self.dtype).values()) + FRAME_BYTES
            )
        return self._known[form]

    def sizes(self, exchange: Exchange, round_index: int, site: str) -> tuple[int, int]:
        """Return the bytes of one site's frames in a round: (up, down)."""
        return self.size(exchange.up), self.size(exchange.down)

    def ranks(self) -> dict[str, int]:
        """Return every site's rank; of fedplora the number of modules it trains."""
        ranks = {site: rank_of_site(self.config, site) for site in self.sites}
        if self.config.run.method == "fedplora":
            named = site_ranks(self.config)
            return {s: r if s in named else max(1, r // 2) for s, r in ranks.items()}
        return ranks

    def side_ranks(self) -> list[int]:
        """Return the rank of the side adapter that each round starts from."""
        method, full, cap = self.config.run.method, self.config.lora.rank, self.config.lora.carry_rank
        ranks, found = list(self.ranks().values()), [0]
        for _ in range(self.config.run.rounds - 1):
            side, n = found[-1], len(ranks)
            if method == "flora":
                side = min(side + sum(ranks), cap or self.room)
            elif set(ranks) == {full}:
                side = min(side + (n - 1) * full, cap or self.room)
            else:
                total = n * (side + full)
                side = max(0, (min(total, cap) if cap else total) - full)
            found.append(min(side, self.room))
        return found

    def rounds(self) -> list[dict[str, Any]]:
        """Return {round, up: {site: bytes}, down: {site: bytes}} of every round."""
        method, full = self.config.run.method, self.config.lora.rank
        ranks = self.ranks() if self.modules else {}
        sides = self.side_ranks() if method in ("carry", "fedex", "flora") else [0] * self.config.run.rounds
        sketch = self.config.lora.sketch or len(self.sites) * full
        found = []
        for commits, side in enumerate(sides):
            up, down = {}, {}
            for position, site in enumerate(sorted(self.sites)):
                rank = ranks.get(site, full)
                carry = side if method == "flora" else side + full - rank
                exchange = exchange_of(
                    self.config,
                    commits,
                    rank=0 if rank == full else rank,
                    carry=carry,
                    position=position,
                    sketch=sketch,
                    returning=commits > 0,
                )
                up[site], down[site] = self.sizes(exchange, commits + 1, site)
            found.append({"round": commits + 1, "up": up, "down": down})
        return found

    def report(self) -> dict[str, Any]:
        """Return the whole plan as plain data."""
        rounds = self.rounds()
        side = 0
        if self.config.run.method in ("carry", "fedex", "flora", "fedplora"):
            form = Form("", carry=max(self.side_ranks()[-1], self.config.lora.rank))
            side = self.size(form)
        trained = self.state_bytes if self.modules else self.base_bytes
        return {
            "method": self.config.run.method,
            "model": self.config.model.name,
            "sites": len(self.sites),
            "adapted_modules": len(self.modules),
            "trainable_parameters": self.trainable,
            "base_bytes": self.base_bytes,
            "rounds": rounds,
            "total_up_bytes": sum(sum(r["up"].values()) for r in rounds),
            "total_down_bytes": sum(sum(r["down"].values()) for r in rounds),
            # Values, gradients and two moments in float32, beside the base.
            "site_memory_bytes": self.base_bytes
            + (trained if self.modules else 0)
            + 12 * self.trainable
            + side,
            # State, its float64 sum and one decoded update; frames beyond 256 MiB lie on the disk.
            "server_memory_bytes": 2 * (trained + side)
            + 8 * self.trainable
            + min(sum(rounds[-1]["up"].values()), 256 * 2**20),
            "global_model": self.config.run.method not in PERSONAL,
            "rounds_per_method_round": STAGES.get(self.config.run.method, 1),
        }


def cohort(config: Config) -> list[str]:
    """Return the names a plan counts with: those of `lora.site-ranks`, filled up to the number of sites of a round."""
    named = list(site_ranks(config))
    count = max(config.clients.goal or config.clients.minimum, len(named))
    return named + [f"site-{i + 1:03d}" for i in range(count - len(named))]


def make_plan(config: Config, sites: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the plan of a configuration as plain data; loads no weights."""
    return Plan(config, sites or cohort(config)).report()


def lines(report: dict[str, Any]) -> list[str]:
    """Return a plan as text: one method, its rounds' bytes for the smallest and largest site."""
    first, last = report["rounds"][0], report["rounds"][-1]
    rows = [
        f"{report['method']} on {report['model']}: {report['sites']} sites, {report['adapted_modules']} adapted layers, "
        f"{report['trainable_parameters']:,} trainable numbers"
        + ("" if report.get("exact_bytes", True) else "; bytes of this codec are estimates"),
    ]
    for entry in [first] if first is last else [first, last]:
        up, down = (
            " to ".join(sorted({units.size(min(v)), units.size(max(v))}))
            for v in (list(entry["up"].values()), list(entry["down"].values()))
        )
        rows.append(f"  round {entry['round']:>4}: a site sends {up}, receives {down}")
    rows.append(
        f"  whole run: {units.size(report['total_up_bytes'])} up, {units.size(report['total_down_bytes'])} down; "
        f"memory {units.size(report['site_memory_bytes'])} a site without activations, "
        f"{units.size(report['server_memory_bytes'])} at the server"
    )
    return rows


def plan(recipe: Any, overrides: list[str] | None, methods: str, *, as_json: bool, say: Any) -> int:
    """Print the plan of a recipe, for its own method or for each of `methods` (comma separated)."""
    names = [m.strip() for m in methods.split(",") if m.strip()] or [""]
    configs = []
    for name in names:
        chosen = [f"run.method={name}"] if name else []
        configs.append(resolve(recipe, [*(overrides or []), *chosen]))
    reports = with_real_frames(configs)
    if as_json:
        say(json.dumps(reports if len(reports) > 1 else reports[0], default=_plain))
        return 0
    for report in reports:
        say("\n".join(lines(report)))
    return 0


def with_real_frames(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """Return the plans with the sizes that the configured codecs will send; the codec room is asked in a process.

    Raises UmbelError with its last line when it fails.
    """
    asked = json.dumps([to_flat(config) for config in configs])
    command = [sys.executable, "-m", "server_app.byte_plan"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UmbelError((done.stderr.strip().splitlines() or ["the plan could not be made"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)
