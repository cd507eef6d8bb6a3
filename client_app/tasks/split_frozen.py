"""The site's half for source `none`: a frozen head, forward only; activations leave once.

    h_j = head(x_j), no graph, codec of activations, with the labels: one message, in the first round
    later rounds: the server has them; the site says so and does nothing

(SplitFrozen, arXiv 2503.18986; MobiLLM, arXiv 2502.20421.) Cheapest at the site in every respect; the server keeps
invertible activations of all rows that were uploaded, and reads the labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from client_app.clock import Clock
from client_app.tasks.split import Progress, SplitResult, batches_of
from client_app.tasks.split_parts import TrueHalf, label_tokens, padded
from umbel.errors import Refusal, RefusalKind
from umbel.seeds import derive_seed
from umbel.split_payload import Payload, pack_payload


class FrozenHalf(TrueHalf):
    """The head as it came; what it makes of the site's rows travels with the reply."""

    held: dict[str, Any]

    def start(
        self, received: dict[str, np.ndarray], moments: dict[str, np.ndarray], *, site: str, round_index: int
    ) -> None:
        """Take the head's tensors; nothing is trained, so there are no moments."""
        self._write(received)
        self.seed = derive_seed(self.config.run.seed, "split-codec", site, round_index)
        self._parts: dict[str, bytes] = {}

    def alone(self, begun: Progress, clock: Clock, options: dict[str, Any], rows: list[Any]) -> SplitResult:
        """Upload what the server lacks; returns the head unchanged, with the tokens the server trains on."""
        cached = self.held.get("cached") or {}
        if cached:
            tokens, chunks = int(cached["tokens"]), int(cached["chunks"])
            return SplitResult(self.arrays(), {}, begun.cursor, tokens, chunks, 0.0, False, {"cached": True})
        progress = begun
        while progress.chunk < options["num_chunks"] and not clock.expired:
            progress = self._chunk(progress, rows, options["site"])
            clock.note(progress.chunk, progress.tokens)
        if progress.chunk == 0:
            raise Refusal(RefusalKind.DEADLINE, "no batch could be sent through the head before the deadline")
        partial = progress.chunk < options["num_chunks"]
        facts = {"transport": "messages", "uploaded_batches": len(self._parts)}
        return SplitResult(
            self.arrays(), {}, progress.cursor, progress.tokens, progress.chunk, 0.0, partial, facts
        )

    def _chunk(self, progress: Progress, rows: list[Any], site: str) -> Progress:
        import torch

        s, index = self.config.split, progress.chunk + 1
        groups, cursor = batches_of(rows, self.config, progress.cursor, site=site, chunk=s.chunk)
        batches = [padded(group) for group in groups]
        counts = [label_tokens(labels) for _, labels in batches]
        for step, (ids, labels) in enumerate(batches):
            with torch.no_grad():
                hidden = self.head(torch.from_numpy(ids).to(self.device))
            payload = Payload(hidden, sum(counts), counts[step], 0.0, labels.astype(np.int32))
            seed = derive_seed(self.seed, "FWD", index, step)
            self._parts[f"h.{index}.{step}"] = pack_payload(payload, s.activation_codec, seed)
        return Progress(cursor, index, progress.tokens + sum(counts))

    def uploads(self) -> dict[str, bytes]:
        """Return the activations and labels of this round."""
        return self._parts
