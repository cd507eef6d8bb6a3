"""Central evaluation: the served state on held-out rows that lie on the server (`eval.central-data`).

    loss = sum of token losses / tokens        perplexity = exp(loss)

The base model is loaded once and kept; every evaluation writes the state of its round into it. Rows at the sites
are scored by the sites (`server_app.heldout` adds their sums): this one is for a public or agreed test set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from server_app.heldout import combine
from server_app.start import Start
from umbel.config import Config

ROWS_A_PASS = 16


class CentralEvaluation:
    """Scores states on the rows of one file; raises DataError at construction when the file cannot be used."""

    def __init__(self, config: Config, start: Start) -> None:
        from umbel.data.encode import encode_rows
        from umbel.data.formats import detect_format
        from umbel.data.sources import load_rows
        from umbel.models.adapter import attach
        from umbel.models.packing import supports_packing
        from umbel.models.source import load_model, load_tokenizer

        self.config, self.settings = config, start.settings
        if config.run.task == "pretrain":
            self.model = load_model(start.spec)
            self.blocks = central_blocks(config, load_tokenizer(start.spec))
            return
        rows = load_rows(config.eval.central_data)
        if config.data.heldout_max:
            rows = rows[: config.data.heldout_max]
        self.rows = encode_rows(
            rows,
            detect_format(rows, config.data.format),
            load_tokenizer(start.spec),
            max_length=config.data.max_length,
            completion_only=config.data.completion_only,
        ).rows
        model: Any = load_model(start.spec)
        self.model = attach(model, start.settings) if config.train.mode == "lora" else model
        self.packing = supports_packing(self.model)

    def score(self, state: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
        """Return loss, token_accuracy, perplexity and tokens of a state; None when no token is supervised."""
        import torch

        from umbel.data.packing import pack_rows, supervised_positions
        from umbel.models.loss import row_loss
        from umbel.models.reshape import load_adapter
        from umbel.models.state import write_state

        if self.config.train.mode == "lora":
            load_adapter(self.model, state, self.settings)
        else:
            write_state(self.model, state, "full")
        self.model.eval()
        if self.config.run.task == "pretrain":
            from umbel.models.block_loss import score_blocks

            scored = score_blocks(self.model, self.blocks, batch_size=ROWS_A_PASS)
            assert scored is not None, "no deadline, no stop"
            return _alone(scored)
        sums = {"loss_sum": 0.0, "tokens": 0.0, "correct": 0.0}
        step = ROWS_A_PASS if self.packing else 1
        with torch.no_grad():
            for first in range(0, len(self.rows), step):
                for packed in pack_rows(self.rows[first : first + step], self.config.train.max_tokens):
                    keep, targets = supervised_positions(packed)
                    if not len(keep):
                        continue
                    out = row_loss(
                        self.model, packed.input_ids, packed.position_ids, keep, targets, count_correct=True
                    )
                    sums["loss_sum"] += float(out.loss)
                    sums["tokens"] += out.tokens
                    sums["correct"] += out.correct
        return _alone(sums)


def central_blocks(config: Config, tokenizer: Any) -> Any:
    """Return every block of the central text, at most `data.heldout-max`; nothing of it is trained on here."""
    import tempfile
    from pathlib import Path

    from umbel.data.tokens import blocks_of, load_corpus

    # The folder lives as long as the process: its files stay readable through their maps.
    folder = tempfile.mkdtemp(prefix="umbel-central-")
    corpus = load_corpus(config.eval.central_data, tokenizer, "central", Path(folder))
    blocks, _ = blocks_of(corpus, config.data.max_length, fraction=0.0)
    most = config.data.heldout_max
    blocks.chosen = blocks.chosen[:most] if most else blocks.chosen
    return blocks


def _alone(sums: Mapping[str, Any]) -> dict[str, Any] | None:
    if not math.isfinite(sums["loss_sum"]):
        return None
    found = combine({"server": dict(sums)})
    if found is not None:
        found.pop("sites")
    return found
