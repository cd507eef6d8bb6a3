"""A served adapter scored on held-out rows: token loss and exact match.

    loss         sum of token losses / tokens, over the rows of all sites
    exact match  share of rows whose whole answer, end token included, greedy decoding would write

Greedy decoding writes exactly the reference if and only if the most likely token is the reference's at every
position, given the reference so far: one forward pass decides it, without generating.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.inprocess import Deployed
from client_app.service import Service
from umbel.config import Config
from umbel.models.described import described
from umbel.models.reshape import load_adapter

ANSWER_MARK = "####"


def score(
    service: Service,
    config: Config,
    sites: Sequence[Deployed],
    states: Mapping[str, Mapping[str, np.ndarray]],
    *,
    after: str = "",
) -> dict[str, float]:
    """Return loss, exact_match, rows and tokens over all sites' held-out rows.

    `states` names the state of each site ("" is everybody's). With `after` a row counts as matched when the tokens
    behind the last occurrence of that text are right (for `#### 72`: the final answer, given the derivation).
    """
    model, _ = service.bench.model(config)
    _, settings = described(config)
    loss, tokens, matched, rows = 0.0, 0, 0, 0
    loaded: str | None = None
    for site in sites:
        name = site.name if site.name in states else ""
        if name != loaded:
            load_adapter(model.model, states[name], settings)
            loaded = name
        for row in service.bench.data(config, site.identity(config), model.tokenizer).heldout:
            right, row_loss = score_row(model, row)
            loss, tokens, rows = loss + row_loss, tokens + len(right), rows + 1
            matched += bool(right[answer_start(model.tokenizer, row, after) :].all())
    return {"loss": loss / tokens, "exact_match": matched / rows, "rows": rows, "tokens": tokens}


def score_row(model: Any, row: Any) -> tuple[np.ndarray, float]:
    """Return (bool [K]: is the most likely token the supervised one, summed loss) of one row."""
    import torch
    import torch.nn.functional as F

    from umbel.data.packing import pack_rows, supervised_positions

    (packed,) = pack_rows([row], len(row.input_ids))
    keep, targets = supervised_positions(packed)
    model.model.eval()
    with torch.no_grad():
        ids = torch.from_numpy(packed.input_ids.astype(np.int64))[None].to(model.device)
        kept = torch.from_numpy(np.asarray(keep, np.int64)).to(model.device)
        wanted = torch.from_numpy(np.asarray(targets, np.int64)).to(model.device)
        logits = model.model(input_ids=ids, logits_to_keep=kept, use_cache=False).logits[0].float()
        loss = F.cross_entropy(logits, wanted, reduction="sum")
    return (logits.argmax(-1) == wanted).cpu().numpy(), float(loss)


def answer_start(tokenizer: Any, row: Any, after: str) -> int:
    """Return the first supervised position behind the last `after`; 0 without it: the whole answer counts."""
    if not after:
        return 0
    wanted = [int(t) for t in row.labels if t >= 0]
    for position in range(len(wanted), 0, -1):
        if after in tokenizer.decode(wanted[position - 1 :]):
            return position
    return 0
