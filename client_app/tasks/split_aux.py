"""The site's half for the sources with an auxiliary model a: a copy of the body's first blocks with norm and LM head.

    aux-loss       (phi, a) <- (phi, a) - eta grad L(a(h), y)            CSE-FSL (2507.15816); phi and a are averaged
    aux-estimate   phi <- phi - eta J_phi^T dL(a(h), y)/dh               FSL-SAGE (2505.23182); a is the server's to align

Nothing is exchanged within a round. Of every `split.upload-every`-th batch (h, y) travels with the update: the body is
trained on those. K batches are one step, as everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import compression
from client_app.clock import Clock
from client_app.tasks.split import Progress, SplitResult, batches_of
from client_app.tasks.split_parts import TrueHalf, label_tokens, padded
from compression import Layout
from compression.roles import role_for
from umbel.errors import Refusal, RefusalKind
from umbel.local_step import make_optimizer, rate_at
from umbel.seeds import derive_seed
from umbel.split_payload import Payload, pack_payload

AUX = "aux"


class AuxHalf(TrueHalf):
    """Head and auxiliary model of one round; only the head's tensors are the half's own."""

    def __init__(self, config: Any, head: Any, aux: Any, tokenizer: Any, device: str) -> None:
        super().__init__(config, head, None, tokenizer, device)
        from umbel.models.state import to_numpy

        self.aux = aux
        self.aux_layout = Layout.from_arrays({n: to_numpy(n, p) for n, p in aux.parameters.items()}, role_for)
        self.learns = config.split.gradient == "aux-loss"
        self._uploads: dict[str, bytes] = {}

    def take(self, parts: dict[str, bytes]) -> None:
        """Take the auxiliary adapter that the server sends; raises Refusal when there is none."""
        import torch

        from umbel.models.state import to_torch

        if AUX not in parts:
            raise Refusal(RefusalKind.REFUSED, "the instruction carries no auxiliary adapter")
        arrays = compression.decode(parts[AUX], self.aux_layout)
        with torch.no_grad():
            for name, parameter in self.aux.parameters.items():
                parameter.copy_(to_torch(arrays[name]))
                parameter.requires_grad_(self.learns)
        self._aux_step = make_optimizer(list(self.aux.parameters.values()), self.config.train)
        self._uploads = {}

    def alone(self, begun: Progress, clock: Clock, options: dict[str, Any], rows: list[Any]) -> SplitResult:
        """Train for a round without the server."""
        progress = begun
        while progress.chunk < options["num_chunks"] and not clock.expired:
            progress = self._chunk(progress, rows, options)
            clock.note(progress.chunk, progress.tokens)
        if progress.tokens == 0:
            raise Refusal(RefusalKind.DEADLINE, "no chunk could be finished before the deadline")
        facts = {"transport": "messages", "uploaded_batches": sum(n.startswith("h.") for n in self._uploads)}
        loss = progress.loss_sum / progress.tokens
        partial = progress.chunk < options["num_chunks"]
        return SplitResult(
            self.arrays(),
            self.moments(),
            progress.cursor,
            progress.tokens,
            progress.chunk,
            loss,
            partial,
            facts,
        )

    def _chunk(self, progress: Progress, rows: list[Any], options: dict[str, Any]) -> Progress:
        import torch

        from umbel.split_loss import hidden_loss

        s, index = self.config.split, progress.chunk + 1
        groups, cursor = batches_of(rows, self.config, progress.cursor, site=options["site"], chunk=s.chunk)
        batches = [padded(group) for group in groups]
        counts = [label_tokens(labels) for _, labels in batches]
        total, loss_sum = sum(counts), 0.0
        for optimizer in (self.steps[0][1], self._aux_step):
            optimizer.zero_grad(set_to_none=True)
        for step, (ids, labels) in enumerate(batches):
            hidden = self.head(torch.from_numpy(ids).to(self.device))
            wanted = torch.from_numpy(labels).to(self.device)
            loss = hidden_loss(self.aux.output, self.aux(hidden), wanted, s.loss_block)
            (loss / max(1, total)).backward()
            loss_sum += float(loss.detach())
            if (progress.chunk * s.chunk + step) % s.upload_every == 0 and counts[step]:
                payload = Payload(hidden.detach(), counts[step], counts[step], 0.0, labels.astype(np.int32))
                seed = derive_seed(self.seed, "FWD", index, step)
                self._uploads[f"h.{index}.{step}"] = pack_payload(payload, s.activation_codec, seed)
        rate = rate_at(self.config.train, options["first_step"] + progress.chunk, options["total_steps"])
        self._step(0, rate)
        if self.learns:
            for group in self._aux_step.param_groups:
                group["lr"] = rate
            self._aux_step.step()
        return Progress(cursor, index, progress.tokens + total, progress.loss_sum + loss_sum)

    def uploads(self) -> dict[str, bytes]:
        """Return activations and labels of the uploaded batches, and a where it was trained here."""
        if not self.learns:
            return self._uploads
        from umbel.models.state import to_numpy

        arrays = {name: to_numpy(name, p) for name, p in self.aux.parameters.items()}
        return {**self._uploads, AUX: bytes(compression.encode(arrays, self.aux_layout, "exact"))}
