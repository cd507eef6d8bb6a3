"""The adapter's rank that a site asks for: a number its operator wrote, or the largest that its free memory carries.

    --node-config 'name="clinic" rank=4'            this rank
    --node-config 'name="clinic" rank="auto"'       lora.rank, halved until it fits (1 at the least)
    none                                            0: whatever the run says

A rank r takes, for every adapted layer of in x out, r (in + out) numbers in float32 four times: value, gradient and
AdamW's two moments. It fits when that is at most `SHARE` of what is free after the base model is loaded; the rest is
for activations, which depend on rows and are not estimated. Only methods for sites of different rank
(`lora.site-ranks` names them) follow the request; the answer is asked for when a site joins, never in mid run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from umbel.errors import Refusal, RefusalKind

AUTO = "auto"
SHARE = 0.5
COPIES = 4


def asked_rank(node_config: Mapping[str, Any]) -> int:
    """Return the rank a node config names, 0 for none or "auto"; raises Refusal for anything else."""
    value = str(node_config.get("rank") or 0).strip()
    if value == AUTO:
        return 0
    if not value.isdigit():
        raise Refusal(
            RefusalKind.REFUSED,
            f"rank = {value!r} in this site's node config is neither a whole number nor 'auto'. Correct it there.",
        )
    return int(value)


def wants_negotiation(node_config: Mapping[str, Any]) -> bool:
    """Return whether the rank is to be found from the free memory."""
    return str(node_config.get("rank") or "").strip() == AUTO


def trained_bytes(shapes: Iterable[tuple[int, int]], rank: int) -> int:
    """Return the bytes that training takes at a rank; `shapes` are the adapted layers' (in, out)."""
    return 4 * COPIES * rank * sum(i + o for i, o in shapes)


def largest_rank(shapes: Iterable[tuple[int, int]], most: int, free_bytes: int) -> int:
    """Return `most`, or the first of its halves whose training fits into `SHARE` of `free_bytes`; at least 1."""
    layers, rank = list(shapes), most
    while rank > 1 and trained_bytes(layers, rank) > SHARE * free_bytes:
        rank //= 2
    return max(1, rank)


def free_bytes(device: str) -> int:
    """Return the free bytes of the device a site trains on: of the GPU, else of the machine's memory."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)
