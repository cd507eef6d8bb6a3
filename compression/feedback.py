"""Error feedback as a transaction: what compression loses stays at the site until it is really applied.

    p = beta e + u        send F = encode(p)        e' = p - decode(F)

u is the site's unweighted update (local minus global). A frame that was sent stays *pending*, on disk
together with e', until the server names its outcome:

    applied     e' stands, the entry is dropped
    dropped     (lost, late, skipped)  e <- e + beta^j decode(F), j = decays since: the mass comes back
    rejected    (failed validation)    e <- the value before that round: bad mass must not return

No ack: the entry is kept, nothing is guessed. An ack twice, or of an unknown frame: no effect, logged. The
same attempt gets the same bytes; a new attempt of a round starts from the residual before it. With beta = 1

    sum of applied + sum of pending + e = sum of updates                   for any order of these events.

References: Seide et al. 2014, Karimireddy et al. 2019 (error feedback); SparseLoCo, Sarfi et al. 2025
(decay). It does not weight, average or step; and what a server clips off is lost on purpose.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from compression.api import check_policy, decode, encode
from compression.bounds import Exact, may_carry_residual
from compression.durable import load, save
from compression.layout import DTYPES, Layout
from compression.policy import EXACT, Policy
from compression.registry import build
from umbel.errors import ConfigError

log = logging.getLogger(__name__)
Vectors = dict[str, np.ndarray]
_REMEMBERED = 64  # settled frame ids kept to tell a repeated ack from an unknown one


class Outcome(StrEnum):
    """What became of a frame, as the server recorded it with its commit."""

    APPLIED = "applied"
    DROPPED = "dropped"
    REJECTED = "rejected"


def frame_id(frame: bytes | memoryview) -> str:
    """SHA-256 of a frame, hex: the name under which it is acknowledged."""
    return hashlib.sha256(frame).hexdigest()


@dataclass
class _Pending:
    round_index: int
    attempt: int
    sha: str
    frame: bytes
    before: Vectors
    factor: float = 1.0  # beta^j: how much of this entry's outcome is left in the newest residual
    after: Vectors | None = None  # the residual it left behind, kept once the entry that followed it is gone


@dataclass
class _State:
    """All that must survive a restart, replaced as a whole."""

    residual: Vectors
    generation: int = 0
    pending: tuple[_Pending, ...] = ()
    settled: tuple[str, ...] = field(default=())


class ErrorFeedback:
    """The residual of one (run, site, direction, fragment), durable under `path`.

    `key` is what the residual belongs to; a file written under another key, layout or policy is refused.
    `decay` is beta in (0, 1]. A base generation that moves by more than `max_generation_gap` discards
    everything, logged. Raises ConfigError for a codec that must not carry a residual, StateError for a
    damaged file.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        policy: Policy | str,
        *,
        key: Mapping[str, str] | None = None,
        decay: float = 1.0,
        max_generation_gap: int = 1,
    ) -> None:
        self.path, self.layout, self.policy = Path(path), layout, check_policy(policy)
        if not 0 < decay <= 1:
            raise ConfigError("compression.decay", "is out of range", got=decay, allowed="(0, 1]")
        refuse_residual(self.policy)
        self.decay, self.max_generation_gap = decay, max_generation_gap
        self._identity = {
            "key": dict(key or {}),
            "layout": layout.digest(),
            "policy": str(self.policy),
            "decay": decay,
        }
        self._lossy = [e for e in layout.entries if self.policy.pipeline_for(e) != EXACT]
        self._state = self._read() if self.path.exists() else _State(self._zeros())

    @property
    def residual(self) -> Vectors:
        """The newest residual by tensor name, float32 copies; tensors that travel exactly have none."""
        return {name: array.copy() for name, array in self._state.residual.items()}

    @property
    def pending(self) -> tuple[str, ...]:
        """Ids of the frames without an outcome, oldest first."""
        return tuple(entry.sha for entry in self._state.pending)

    def norm(self) -> float:
        """L2 norm of the newest residual."""
        return float(np.sqrt(sum(float(np.vdot(a, a)) for a in self._state.residual.values())))

    def norm_ratio(self, update: Mapping[str, np.ndarray]) -> float:
        """||e|| / ||u|| over the tensors that may be lossy: an alarm when it keeps growing. 0 for a zero
        update."""
        squares = [float((update[e.name].astype(np.float64) ** 2).sum()) for e in self._lossy]
        size = sum(squares) ** 0.5
        return self.norm() / size if size else 0.0

    def encode(
        self,
        update: Mapping[str, np.ndarray],
        *,
        round_index: int,
        attempt: int = 0,
        seed: int = 0,
        base: str = "",
        generation: int = 0,
    ) -> bytes:
        """The frame to send for this round and attempt. On disk before it is returned.

        Called again for an attempt that is pending (a restart), it returns the same bytes and ignores
        `update`.
        """
        again = self.pending_frame(round_index, attempt)
        if again is not None:
            return again
        state = self._without_round(self._fresh(generation), round_index)
        corrected = {e.name: self._corrected(e.name, update[e.name], state) for e in self._lossy}
        sent = dict(update)
        for entry in self._lossy:
            sent[entry.name] = corrected[entry.name].astype(DTYPES[entry.dtype]).reshape(entry.shape)
        frame = encode(sent, self.layout, self.policy, seed=seed, round_index=round_index, base=base)
        received = decode(frame, self.layout)
        after = {
            name: (p - received[name].reshape(-1).astype(p.dtype)).astype(np.float32)
            for name, p in corrected.items()
        }
        made = _Pending(round_index, attempt, frame_id(frame), frame, state.residual)
        older = tuple(replace(p, factor=p.factor * self.decay) for p in state.pending)
        self._write(replace(state, residual=after, pending=(*older, made), generation=generation))
        return frame

    def pending_frame(self, round_index: int, attempt: int) -> bytes | None:
        """The frame already made for this attempt, or None."""
        for entry in self._state.pending:
            if (entry.round_index, entry.attempt) == (round_index, attempt):
                return entry.frame
        return None

    def settle(self, outcomes: Mapping[str, Outcome | str]) -> list[str]:
        """Apply the server's outcomes by frame id; returns the ids that had an effect. Durable,
        idempotent."""
        state, effective = self._state, []
        for sha, outcome in outcomes.items():
            found = next((i for i, entry in enumerate(state.pending) if entry.sha == sha), None)
            if found is None:
                known = "was settled before" if sha in state.settled else "is unknown here"
                log.info("acknowledgement %s of frame %s ignored: it %s", outcome, sha[:12], known)
                continue
            state = self._settled(state, found, Outcome(outcome))
            effective.append(sha)
        if effective:
            self._write(state)
        return effective

    def missed(self, num_rounds: int) -> None:
        """The site took no part in `num_rounds` rounds: e <- beta^m e."""
        scale = self.decay**num_rounds
        if scale == 1.0 or num_rounds <= 0:
            return
        residual = {name: array * np.float32(scale) for name, array in self._state.residual.items()}
        pending = tuple(replace(entry, factor=entry.factor * scale) for entry in self._state.pending)
        self._write(replace(self._state, residual=residual, pending=pending))

    def discard(self, reason: str) -> None:
        """Forget the residual and everything pending, saying so in the log."""
        log.warning(
            "residual of norm %.3g and %d frames discarded: %s", self.norm(), len(self.pending), reason
        )
        self._write(_State(self._zeros(), self._state.generation))

    def _fresh(self, generation: int) -> _State:
        if abs(generation - self._state.generation) > self.max_generation_gap and (
            self.pending or self.norm()
        ):
            self.discard(f"the base moved from generation {self._state.generation} to {generation}")
        return self._state

    def _corrected(self, name: str, update: np.ndarray, state: _State) -> np.ndarray:
        wide = np.dtype(np.float64 if update.dtype == np.float64 else np.float32)
        return update.reshape(-1).astype(wide) + state.residual[name].astype(wide) * wide.type(self.decay)

    def _without_round(self, state: _State, round_index: int) -> _State:
        """A new attempt redoes the round's work: an earlier attempt's update is withdrawn."""
        for index, entry in enumerate(state.pending):
            if entry.round_index == round_index:
                log.info("round %d is tried again: attempt %d is withdrawn", round_index, entry.attempt)
                return self._settled(state, index, Outcome.REJECTED)
        return state

    def _settled(self, state: _State, index: int, outcome: Outcome) -> _State:
        entry, later = state.pending[index], state.pending[index + 1 :]
        settled = (*state.settled, entry.sha)[-_REMEMBERED:]
        earlier = self._remember_after(state.pending[:index], entry)
        if outcome is Outcome.APPLIED:
            return replace(state, pending=earlier + later, settled=settled)
        if outcome is Outcome.DROPPED:
            decoded = decode(entry.frame, self.layout)
            change: Vectors = {e.name: decoded[e.name].reshape(-1).astype(np.float32) for e in self._lossy}
        else:
            after, share = self._after(state, index)
            change = {name: array - after[name] / np.float32(share) for name, array in entry.before.items()}
        # the states that later entries start from, and leave behind, have this entry's outcome in them too
        moved = tuple(self._moved(p, change, self._share(entry, p)) for p in later)
        residual = _added(state.residual, change, entry.factor)
        if outcome is Outcome.REJECTED and not later and entry.after is None and entry.factor == 1.0:
            residual = entry.before  # nothing came after it: exactly what was there
        return replace(state, residual=residual, pending=earlier + moved, settled=settled)

    def _after(self, state: _State, index: int) -> tuple[Vectors, float]:
        """(residual just after entry `index` times a share, the share)."""
        entry, later = state.pending[index], state.pending[index + 1 :]
        if entry.after is not None:
            return entry.after, 1.0
        if later:
            return later[0].before, self._share(entry, later[0])
        return state.residual, entry.factor

    def _remember_after(self, earlier: tuple[_Pending, ...], gone: _Pending) -> tuple[_Pending, ...]:
        if not earlier or earlier[-1].after is not None:
            return earlier
        share = np.float32(self._share(earlier[-1], gone))
        after = {name: array / share for name, array in gone.before.items()}
        return (*earlier[:-1], replace(earlier[-1], after=after))

    def _moved(self, entry: _Pending, change: Vectors, share: float) -> _Pending:
        after = None if entry.after is None else _added(entry.after, change, share * self.decay)
        return replace(entry, before=_added(entry.before, change, share), after=after)

    def _share(self, entry: _Pending, later: _Pending) -> float:
        """How much of `entry`'s outcome is left in the residual before `later` was encoded."""
        return entry.factor / (self.decay * later.factor)

    def _zeros(self) -> Vectors:
        return {entry.name: np.zeros(entry.numel, np.float32) for entry in self._lossy}

    def _write(self, state: _State) -> None:
        arrays = {f"residual/{name}": array for name, array in state.residual.items()}
        rows = []
        for number, entry in enumerate(state.pending):
            arrays[f"frame/{number}"] = np.frombuffer(entry.frame, np.uint8)
            arrays.update({f"before/{number}/{name}": array for name, array in entry.before.items()})
            arrays.update({f"after/{number}/{name}": array for name, array in (entry.after or {}).items()})
            rows.append([entry.round_index, entry.attempt, entry.sha, float(entry.factor).hex()])
        document = {
            "identity": self._identity,
            "generation": state.generation,
            "pending": rows,
            "settled": list(state.settled),
        }
        save(self.path, arrays, document)
        self._state = state

    def _read(self) -> _State:
        arrays, document = load(self.path)
        if document["identity"] != self._identity:
            raise ConfigError(
                "compression residual",
                f"at {self.path} belongs to something else",
                got=document["identity"],
                allowed=str(self._identity),
                remedy="Use another state directory, or remove the file to start without a residual.",
            )
        names = [entry.name for entry in self._lossy]
        pending = tuple(
            _Pending(
                round_index,
                attempt,
                sha,
                arrays[f"frame/{number}"].tobytes(),
                {name: arrays[f"before/{number}/{name}"] for name in names},
                float.fromhex(factor),
                {name: arrays[f"after/{number}/{name}"] for name in names}
                if names and f"after/{number}/{names[0]}" in arrays
                else None,
            )
            for number, (round_index, attempt, sha, factor) in enumerate(document["pending"])
        )
        residual = {name: arrays[f"residual/{name}"] for name in names}
        return _State(residual, document["generation"], pending, tuple(document["settled"]))


def refuse_residual(policy: Policy) -> None:
    """Raise ConfigError if a codec of the policy must not carry a residual (unbiased, or without any
    bound)."""
    for _, pipeline in policy.rules:
        bound = build(pipeline).bound
        if not isinstance(bound, Exact) and not may_carry_residual(bound):
            raise ConfigError(
                "compression residual",
                f"cannot be kept for {pipeline}: its only bound is {type(bound).__name__}",
                got=str(policy),
                allowed="contractive codecs: rounding rtn, scaling contractive, ecsq, sign, topk",
                remedy="Use the contractive form, or switch error feedback off.",
            )


def _added(vectors: Vectors, change: Vectors, factor: float) -> Vectors:
    return {name: array + np.float32(factor) * change[name] for name, array in vectors.items()}
