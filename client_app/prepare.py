"""Everything a round needs before work begins: warm model and rows, and the server's state in the model, verified.

The layout named in the instruction is compared with the site's own before a byte is decoded, and the decoded state
with its name (`base`) before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import compression
from client_app.exchange import layouts, load
from client_app.held import receive
from client_app.identity import Identity
from client_app.precision import resolve_precision
from client_app.sent import keep_layout
from client_app.state import SiteState
from client_app.workbench import SiteData, SiteModel, Workbench
from compression import Layout
from compression.payload import delta_layout
from umbel.config import Config
from umbel.digest import short, state_crc
from umbel.errors import Refusal, RefusalKind
from umbel.exchange import Exchange
from umbel.messages import Instruction, parse_json
from umbel.models.described import described
from umbel.models.lora import LoraSettings


@dataclass(frozen=True)
class Prepared:
    """A site at the start of a round; `received` are the arrays that came down, by name.

    `load_seconds` is what loading the model took now, 0.0 when it was warm.
    """

    model: SiteModel
    data: SiteData
    settings: LoraSettings
    exchange: Exchange
    up_layout: Layout
    received: dict[str, np.ndarray]
    precision: str
    load_seconds: float


def prepare(
    bench: Workbench,
    instruction: Instruction,
    config: Config,
    site: Identity,
    frame: bytes | None,
    remembered: Mapping[str, Any],
) -> Prepared:
    """Load model and rows and write the instruction's state into the model; raises Refusal when it is another one.

    `remembered` are the site's own arrays, for methods that keep some here.
    """
    from umbel.models.state import write_state

    set_threads(config.train.threads)
    model, load_seconds = bench.model(config)
    data = bench.data(config, site, model.tokenizer)
    if frame is None:
        raise Refusal(RefusalKind.REFUSED, "the instruction carries no state")
    exchange, settings = exchange_in(instruction), described(config)[1]
    down_layout, up_layout = layouts(model, settings, exchange)
    received = decode_state(instruction, frame, down_layout, site.state_dir)
    # The names behind the frames that come and go, for the site's own records and bounds.
    folder = SiteState(site.state_dir, instruction.run, site.name).folder
    for layout in (down_layout, up_layout, delta_layout(up_layout)):
        keep_layout(folder, layout)
    if config.train.mode == "lora":
        load(model, settings, exchange, received, remembered, config.run.seed)
    else:
        write_state(model.model, received, config.train.mode)
    precision = resolve_precision(config.train.precision, model.device)
    return Prepared(model, data, settings, exchange, up_layout, received, precision, load_seconds)


def decode_state(
    instruction: Instruction, frame: bytes, layout: Layout, state_dir: Path
) -> dict[str, np.ndarray]:
    """Return the arrays the instruction starts from; raises Refusal when layout or content is not what it names.

    They are the frame's content, or, where the way down is lossy, what its changes make of the model held here.
    """
    if instruction.layout != layout.digest():
        raise Refusal(
            RefusalKind.REFUSED,
            f"the server's tensors (layout {short(instruction.layout)}) are not this site's "
            f"({short(layout.digest())}): the models or the versions of peft differ",
        )
    changes = parse_json(instruction.directives, "directives").get("downlink")
    if changes is None:
        arrays = compression.decode(frame, layout)
    else:
        folder = SiteState(state_dir, instruction.run, instruction.site).folder
        arrays = receive(folder, frame, changes, layout)
    if (got := state_crc(arrays)) != instruction.base:
        raise Refusal(
            RefusalKind.REFUSED,
            f"the state received is {short(got)}, the server meant {short(instruction.base)}",
        )
    return arrays


def exchange_in(instruction: Instruction) -> Exchange:
    """Return what this instruction exchanges; the adapter or model both ways where it says nothing."""
    return Exchange.from_dict(parse_json(instruction.directives, "directives").get("exchange", {}))


def read_settled(instruction: Instruction) -> tuple[int, int]:
    """Return (round, attempt) of this site's last committed update; (0, 0) for none."""
    value = parse_json(instruction.settled, "settled")
    return int(value[0]), int(value[1])


def set_threads(threads: int) -> None:
    """Fix the number of CPU threads where the run asks for it: sums then have one order everywhere."""
    if threads > 0:
        import torch

        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
