"""The server's half for auxiliary sources: the body trained on uploads, the auxiliary models averaged or aligned.

    COMMIT, canonical order   per accepted site, per uploaded batch: one AdamW step of psi on L(body(h), y)
    aux-loss                  a <- sum p_i a_i                                            (CSE-FSL, 2507.15816)
    aux-estimate, when due    t_j = dL(body(h_j), y_j)/dh_j over the site's buffer, with the present psi
                              a_i <- argmin 1/2 sum |dL(a(h_j), y_j)/dh_j - t_j|^2 / sum |t_j|^2   (FSL-SAGE, 2505.23182)

Due: every `split.align-every` rounds, or when the relative error of the estimate on the newest batch exceeds
`split.align-threshold`. Every fourth batch of the buffer is held out; the cosine of estimate and truth on those is
recorded before and after. The alignment differentiates twice: it needs attention "eager". Auxiliary adapters and buffers
lie in the run folder, one file a round, so that a resumed run goes on with the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import compression
from compression import Layout
from compression.roles import role_for
from server_app.split_cached import CachedBody, CachedHalf, parse
from server_app.split_half import Psi
from umbel.fsio import safe_name, write_atomic
from umbel.local_step import make_optimizer
from umbel.split import SplitError
from umbel.split_bundle import pack_bundle, unpack_bundle
from umbel.split_payload import Payload
from umbel.tensorfile import dump_tensors, load_tensors

AUX = "aux"
HELD_OUT = 4
KEEP_ROUNDS = 4


class AuxBody(CachedBody):
    """The body, and one auxiliary adapter a site (aux-estimate) or one for all (aux-loss)."""

    def begin(
        self, index: int, attempt: int, state: Mapping[str, np.ndarray], first_step: int, total_steps: int
    ) -> None:
        """Start a round with the auxiliary adapters of the last commit; copies of the body's blocks at first."""
        super().begin(index, attempt, state, first_step, total_steps)
        if not hasattr(self, "aux"):
            self.aux = load_aux(self)
        names = list(self.aux.parameters)
        self.start_aux = {name: np.array(state[name]) for name in names}
        self.layout = Layout.from_arrays(self.start_aux, role_for)
        path = self.folder / f"aux-{index - 1:06d}.safetensors"
        held = load_tensors(path.read_bytes()) if index > 1 and path.exists() else {}
        self.adapters: dict[str, dict[str, np.ndarray]] = {}
        for key, array in held.items():
            who, _, name = key.partition("/")
            self.adapters.setdefault(who, {})[name] = array

    def adapter(self, site: str) -> dict[str, np.ndarray]:
        """Return the auxiliary adapter a site starts from."""
        return self.adapters.get(self._who(site), self.start_aux)

    def _who(self, site: str) -> str:
        return safe_name(site) if self.config.split.gradient == "aux-estimate" else "all"

    def down(self, site: str) -> dict[str, bytes]:
        """Return the auxiliary adapter for one site."""
        return {AUX: bytes(compression.encode(self.adapter(site), self.layout, "exact"))}

    def directive(self, site: str) -> dict[str, Any]:
        """Return what the instruction says besides the link."""
        return {"chunk": self.config.split.chunk}

    def open(self, site: str) -> AuxHalf:  # type: ignore[override]
        """Return one site's half."""
        made = AuxHalf(self, site)
        self._halves[site] = made
        return made

    def after(
        self, state: Mapping[str, np.ndarray], sites: list[str]
    ) -> tuple[Mapping[str, np.ndarray], dict[str, Any]]:
        """Train the body on this round's uploads of `sites` and renew the auxiliary adapters."""
        psi, loss, tokens, steps = Psi(self, state), 0.0, 0, 0
        for site in sites:
            for number, payload in enumerate(self._halves[site].given):  # type: ignore[attr-defined]
                loss += self._train(psi, [payload], number)
                tokens, steps = tokens + payload.tokens, steps + 1
        facts: dict[str, Any] = {"server_loss": loss / max(1, tokens), "server_steps": steps}
        if self.config.split.gradient == "aux-loss":
            self.adapters["all"] = self._average(sites)
        else:
            facts["alignment"] = self._align_all(psi, sites)
        self._keep()
        return psi.arrays(), facts

    def _average(self, sites: list[str]) -> dict[str, np.ndarray]:
        halves = [self._halves[site] for site in sites]
        weights = np.array([h.weight for h in halves], np.float64)  # type: ignore[attr-defined]
        found = {}
        for name, start in self.start_aux.items():
            stack = [np.asarray(h.aux[name], np.float64) for h in halves]  # type: ignore[attr-defined]
            total = sum(w * a for w, a in zip(weights, stack, strict=True))
            found[name] = (total / weights.sum()).astype(start.dtype)
        return found

    def _align_all(self, psi: Psi, sites: list[str]) -> dict[str, Any]:
        s, index = self.config.split, self._index[0]
        found = {}
        for site in sites:
            buffer = self._buffer(site)
            if len(buffer) < HELD_OUT:
                continue
            targets = [self._truth(psi, payload) for payload in buffer]
            error = self._error(self.adapter(site), buffer[-1], targets[-1])
            due = index % s.align_every == 0 if s.align == "interval" else error > s.align_threshold
            if due:
                found[site] = {"error": error, **self._align(site, buffer, targets)}
        return found

    def _buffer(self, site: str) -> list[Payload]:
        """Append this round's uploads to the site's buffer and return what is in it, oldest first."""
        path = self.folder / f"buffer-{safe_name(site)}.bundle"
        held = unpack_bundle(path.read_bytes()) if path.exists() else {}
        for name, data in self._halves[site].raw.items():  # type: ignore[attr-defined]
            held[f"{self._index[0]}.{name}"] = data
        kept = dict(list(held.items())[-self.config.split.buffer :])
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, pack_bundle(kept))
        return [parse(self, data) for data in kept.values()]

    def _truth(self, psi: Psi, payload: Payload) -> Any:
        psi.put()
        return self._gradient(self.part, payload, graph=False)

    def _gradient(self, part: Any, payload: Payload, *, graph: bool) -> Any:
        """Return dL/dh at h, of the mean loss of one batch."""
        import torch

        from umbel.split_loss import hidden_loss

        leaf = payload.tensor.to(part.device).requires_grad_(True)
        labels = torch.from_numpy(np.asarray(payload.labels, np.int64)).to(part.device)
        loss = hidden_loss(part.output, part(leaf), labels) / max(1, payload.tokens)
        return torch.autograd.grad(loss, leaf, create_graph=graph)[0]

    def _put_aux(self, arrays: Mapping[str, np.ndarray]) -> None:
        import torch

        from umbel.models.state import to_torch

        with torch.no_grad():
            for name, parameter in self.aux.parameters.items():
                parameter.copy_(to_torch(arrays[name]))

    def _error(self, arrays: Mapping[str, np.ndarray], payload: Payload, target: Any) -> float:
        self._put_aux(arrays)
        estimate = self._gradient(self.aux, payload, graph=False)
        return float(((estimate - target) ** 2).sum() / (target**2).sum().clamp_min(1e-30))

    def _align(self, site: str, buffer: list[Payload], targets: list[Any]) -> dict[str, float]:
        """Fit the site's auxiliary adapter to the true gradients; returns held-out cosines before and after."""
        from umbel.models.state import to_numpy

        s = self.config.split
        fit = [i for i in range(len(buffer)) if i % HELD_OUT != HELD_OUT - 1]
        held = [i for i in range(len(buffer)) if i % HELD_OUT == HELD_OUT - 1]
        self._put_aux(self.adapter(site))
        before = self._cosine([buffer[i] for i in held], [targets[i] for i in held])
        parameters = list(self.aux.parameters.values())
        optimizer = make_optimizer(parameters, self.config.train)
        for group in optimizer.param_groups:
            group["lr"] = s.align_rate
        norm = sum(float((targets[i] ** 2).sum()) for i in fit)
        for _ in range(s.align_steps):
            optimizer.zero_grad(set_to_none=True)
            for i in fit:
                estimate = self._gradient(self.aux, buffer[i], graph=True)
                (0.5 * ((estimate - targets[i]) ** 2).sum() / max(norm, 1e-30)).backward()
            optimizer.step()
        after = self._cosine([buffer[i] for i in held], [targets[i] for i in held])
        arrays = {name: to_numpy(name, p) for name, p in self.aux.parameters.items()}
        if all(np.isfinite(np.asarray(a, np.float32)).all() for a in arrays.values()):
            self.adapters[self._who(site)] = arrays
        return {"cosine_before": before, "cosine_after": after}

    def _cosine(self, payloads: list[Payload], targets: list[Any]) -> float:
        dot = one = two = 0.0
        for payload, target in zip(payloads, targets, strict=True):
            estimate = self._gradient(self.aux, payload, graph=False)
            dot += float((estimate * target).sum())
            one, two = one + float((estimate**2).sum()), two + float((target**2).sum())
        return dot / max((one * two) ** 0.5, 1e-30)

    def _keep(self) -> None:
        arrays = {f"{who}/{n}": a for who, found in self.adapters.items() for n, a in found.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / f"aux-{self._index[0]:06d}.safetensors", dump_tensors(arrays))
        for old in sorted(self.folder.glob("aux-*.safetensors"))[:-KEEP_ROUNDS]:
            old.unlink()


class AuxHalf(CachedHalf):
    """One site's uploads of one round."""

    given: list[Payload]
    raw: dict[str, bytes]
    aux: dict[str, np.ndarray]
    weight: float = 1.0

    def keep(self, parts: Mapping[str, bytes]) -> None:
        """Check and keep a site's uploads; raises SplitError when one is malformed."""
        body: Any = self.body
        self.raw = {name: data for name, data in parts.items() if name.startswith("h.")}
        if not self.raw:
            raise SplitError("the site uploaded no batch")
        self.given = [parse(body, data) for data in self.raw.values()]
        for data, payload in zip(self.raw.values(), self.given, strict=True):
            labels = 4 * int(np.asarray(payload.labels).size)
            self._bytes["act_up"] += len(data) - labels
            self._bytes["label_up"] += labels
        self.weight = float(sum(p.tokens for p in self.given))
        if body.config.split.gradient == "aux-loss":
            if AUX not in parts:
                raise SplitError("the site sent no auxiliary adapter")
            try:
                self.aux = compression.decode(parts[AUX], body.layout)
            except ValueError as error:
                raise SplitError(f"the auxiliary adapter is none: {error}") from error
            self._bytes["aux_up"] += len(parts[AUX])


def load_aux(body: AuxBody) -> Any:
    """Return the auxiliary model on the server, for alignment; the same blocks the sites hold."""
    from umbel.models.described import described
    from umbel.models.part_loading import load_part

    spec, settings = described(body.config)
    cut = body.cut._replace(aux=body.config.split.aux_blocks)
    return load_part(spec, settings, cut, "aux", str(body.part.device))
