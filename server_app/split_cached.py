"""The server's half where activations come by message: kept on disk, and the body is trained when the round commits.

    COMMIT, in canonical order of sites: per chunk of K uploaded batches one AdamW step of psi on sum L_j / sum n_j

One psi for all sites, stepped in a fixed order: the result does not depend on who answered first. A site's uploads
stay in the run folder, so that they travel once and every later round trains on them again (source `none`). A late or
refused site adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from server_app.split_half import Body, BodyResult, Psi
from umbel.errors import ConfigError
from umbel.fsio import safe_name, write_atomic
from umbel.local_step import rate_at
from umbel.split import CATEGORIES, Frame, SplitError
from umbel.split_bundle import pack_bundle, unpack_bundle
from umbel.split_payload import HEAD, Payload, tensor_bytes, unpack_payload
from umbel.telemetry import units


class CachedBody(Body):
    """The body that is trained at commit from what lies in `folder`."""

    def __init__(self, config: Any, names: list[str], folder: Path) -> None:
        super().__init__(config, names)
        self.folder = folder
        self._halves: dict[str, CachedHalf] = {}
        check_message(config, self.dimension)

    def directive(self, site: str) -> dict[str, Any]:
        """Say what of this site is here already."""
        found = super().directive(site)
        path = self.path(site)
        if path.exists():
            given = read_uploads(self, path)
            tokens = sum(p.tokens for p in given)
            found["cached"] = {"tokens": tokens, "chunks": -(-len(given) // self.config.split.chunk)}
        return found

    def path(self, site: str) -> Path:
        """Return the file of one site's uploads."""
        return self.folder / f"{safe_name(site)}.bundle"

    def open(self, site: str) -> CachedHalf:  # type: ignore[override]
        """Return one site's half."""
        self._halves[site] = CachedHalf(self, site)
        return self._halves[site]

    def after(
        self, state: Mapping[str, np.ndarray], sites: list[str]
    ) -> tuple[Mapping[str, np.ndarray], dict[str, Any]]:
        """Train the body on the uploads of `sites`, in that order; returns its tensors and the loss."""
        psi, loss, tokens, steps = Psi(self, state), 0.0, 0, 0
        for site in sites:
            given = read_uploads(self, self.path(site))
            size = self.config.split.chunk
            for at in range(0, len(given), size):
                chunk = given[at : at + size]
                loss += self._train(psi, chunk, at // size)
                tokens += sum(p.tokens for p in chunk)
                steps += 1
        facts = {"train_loss": loss / max(1, tokens), "server_steps": steps}
        return psi.arrays(), facts

    def _train(self, psi: Psi, chunk: list[Payload], index: int) -> float:
        import torch

        from umbel.split_loss import hidden_loss

        total, summed = sum(p.tokens for p in chunk), 0.0
        if total == 0:
            return 0.0
        psi.put()
        for payload in chunk:
            z = self.part(payload.tensor.to(self.part.device))
            labels = torch.from_numpy(np.asarray(payload.labels, np.int64)).to(z.device)
            loss = hidden_loss(self.part.output, z, labels, self.config.split.loss_block)
            (loss / total).backward()
            summed += float(loss.detach())
        psi.take_gradients()
        first, steps = self.schedule
        psi.step(rate_at(self.config.train, first + index, steps), self.config.train.clip_norm)
        return summed


class CachedHalf:
    """One site in one round."""

    def __init__(self, body: CachedBody, site: str) -> None:
        self.body, self.site = body, site
        self._bytes = dict.fromkeys(CATEGORIES, 0)

    def answer(self, frame: Frame) -> Frame:
        """Refuse: with this source nothing is answered within a round."""
        raise SplitError(f"source {self.body.config.split.gradient!r} exchanges nothing within a round")

    def keep(self, parts: Mapping[str, bytes]) -> None:
        """Check and keep a site's uploads; raises SplitError when one is malformed."""
        if not parts:
            if not self.body.path(self.site).exists():
                raise SplitError("the site sent no activations and none are here")
            return
        for data in parts.values():
            given = parse(self.body, data)
            labels = 4 * int(np.asarray(given.labels).size)
            self._bytes["act_up"] += len(data) - labels
            self._bytes["label_up"] += labels
        self.body.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.body.path(self.site), pack_bundle(parts))

    def ledger(self) -> dict[str, int]:
        """Return bytes by category."""
        return dict(self._bytes)

    def result(self, chunk: int) -> BodyResult:
        """Refuse: the body has no state of its own for one site."""
        raise SplitError("this source trains the body at commit")


def parse(body: Body, data: bytes) -> Payload:
    """Return one upload; raises SplitError when it is not what the instruction allows."""
    c = body.config
    return unpack_payload(
        data,
        c.split.activation_codec,
        body.dimension,
        max_rows=c.train.batch_size,
        max_width=c.data.max_length,
        labels=True,
    )


def read_uploads(body: Body, path: Path) -> list[Payload]:
    """Return the uploads of one file, in the order they were made."""
    parts = unpack_bundle(path.read_bytes())
    order = sorted(parts, key=lambda name: tuple(int(n) for n in name.split(".")[1:]))
    return [parse(body, parts[name]) for name in order]


def check_message(config: Any, dimension: int) -> None:
    """Raise ConfigError when a round's uploads would not fit into one message."""
    t, s = config.train, config.split
    each = HEAD.size + tensor_bytes(s.activation_codec, t.batch_size, config.data.max_length, dimension)
    total = t.local_steps * s.chunk * (each + 4 * t.batch_size * config.data.max_length)
    if total > s.max_message_bytes:
        raise ConfigError(
            "split.max-message-bytes",
            f"is less than what a round may upload ({units.size(total)})",
            got=s.max_message_bytes,
            allowed=f">= {total}",
            remedy="Lower train.local-steps, split.chunk, train.batch-size or data.max-length, or use a smaller codec.",
        )
