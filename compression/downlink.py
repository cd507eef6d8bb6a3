"""The downlink: compressed broadcasts against a shadow of what the sites hold.

    F_v = encode(theta - shadow)        shadow <- shadow + decode(F_v)        site: theta <- theta +
    decode(F_v)

The shadow is, bit for bit, the model at every site that has version v; theta - shadow *is* the server's
residual, so there is no second buffer. Versions form a chain h_v = SHA-256(h_{v-1} || SHA-256(F_v)), and
every version names a digest of the shadow's bits. A site that is r versions behind gets the last r frames
if they are all retained and fewer bytes than a lossless snapshot, else the snapshot; a site whose digest
the chain does not know gets the snapshot. It is never told to continue anyway. With exact, lossless or xor
the model itself is sent. Float tensors move by deltas; integers and buffers travel exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from compression.api import Arrays, check_policy, decode, encode, read_header
from compression.errors import FrameError
from compression.layout import DTYPES, FLOAT_DTYPES, Layout
from compression.policy import Policy, parse_policy

_GENESIS = "0" * 64
# A lossless frame of weights is never this small a share of them: no need to make one in order to compare.
_SNAPSHOT_SHARE = 4
_LARGE_BYTES = 64 * 2**20


def digest_of(arrays: Arrays, layout: Layout) -> str:
    """SHA-256 over layout digest and the tensors' bytes in layout order, hex: the name of a model state."""
    state = hashlib.sha256(layout.digest().encode())
    for entry, array in zip(layout.entries, layout.ordered(arrays)):
        state.update(np.ascontiguousarray(array, DTYPES[entry.dtype]).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def chain_hash(previous: str, frame: bytes) -> str:
    """h_v from h_{v-1} and F_v, hex."""
    return hashlib.sha256(bytes.fromhex(previous) + hashlib.sha256(frame).digest()).hexdigest()


@dataclass(frozen=True)
class Version:
    """One broadcast. `digest` names the model after it, `base` the model it applies to."""

    number: int
    frame: bytes
    base: str
    digest: str
    chain: str


@dataclass(frozen=True)
class CatchUp:
    """What a site is sent: frames to apply in order, or one snapshot. Then it holds `digest`."""

    snapshot: bytes | None
    frames: tuple[Version, ...]
    digest: str
    chain: str

    @property
    def num_bytes(self) -> int:
        return len(self.snapshot or b"") + sum(len(version.frame) for version in self.frames)


class Downlink:
    """Server side. `policy` compresses deltas, `keep_versions` frames are retained for sites that fall
    behind."""

    def __init__(
        self, initial: Arrays, layout: Layout, policy: Policy | str, *, keep_versions: int = 8
    ) -> None:
        self.layout, self.policy, self.keep_versions = layout, check_policy(policy), keep_versions
        self.shadow = {e.name: np.array(a) for e, a in zip(layout.entries, layout.ordered(initial))}
        self.versions: list[Version] = []
        self.number, self.chain = 0, _GENESIS
        self.digest = digest_of(self.shadow, layout)
        self._snapshot: bytes | None = None

    def publish(self, theta: Arrays, *, seed: int = 0, round_index: int = 0) -> Version:
        """Make the next version from the server's model; moves the shadow."""
        sent = theta if _is_absolute(self.policy) else difference(theta, self.shadow, self.layout)
        frame = encode(
            sent,
            self.layout,
            self.policy,
            seed=seed,
            round_index=round_index,
            base=self.digest,
            base_arrays=self.shadow,
        )
        if _is_absolute(self.policy):
            self.shadow = advance(self.shadow, frame, self.layout, self.digest)
        else:
            # The difference's own memory takes what the sites will decode, the shadow is moved where it lies.
            received = decode(frame, self.layout, base=self.digest, out=sent)
            _move(self.shadow, received, self.layout)
        base, self.digest = self.digest, digest_of(self.shadow, self.layout)
        self.number, self.chain = self.number + 1, chain_hash(self.chain, frame)
        version = Version(self.number, frame, base, self.digest, self.chain)
        self.versions = self._retained([*self.versions, version])
        self._snapshot = None
        return version

    def _retained(self, versions: list[Version]) -> list[Version]:
        """The newest versions that may ever be replayed: as many as asked for, and fewer bytes than the model."""
        kept: list[Version] = []
        num_bytes = 0
        for version in reversed(versions):
            num_bytes += len(version.frame)
            if len(kept) == self.keep_versions or (kept and num_bytes > self.layout.raw_bytes):
                break
            kept.append(version)
        return kept[::-1]

    def forget_snapshot(self) -> None:
        """Free the memory of the snapshot made for a site that needed one."""
        self._snapshot = None

    def snapshot(self) -> bytes:
        """The shadow as one lossless frame."""
        if self._snapshot is None:
            self._snapshot = encode(
                self.shadow, self.layout, "lossless", round_index=self.number, base=self.digest
            )
        return self._snapshot

    def catch_up(self, held: str) -> CatchUp:
        """What brings a site that reports digest `held` to the newest version, in the fewest bytes."""
        if held == self.digest:
            return CatchUp(None, (), self.digest, self.chain)
        found = [i for i, version in enumerate(self.versions) if version.base == held]
        frames = tuple(self.versions[found[-1] :]) if found else ()
        replay = CatchUp(None, frames, self.digest, self.chain)
        clear = (
            self.layout.raw_bytes > _LARGE_BYTES
            and replay.num_bytes * _SNAPSHOT_SHARE < self.layout.raw_bytes
        )
        if frames and (clear or replay.num_bytes < len(self.snapshot())):
            return replay
        return CatchUp(self.snapshot(), (), self.digest, self.chain)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """(arrays, JSON document) for the server's checkpoint."""
        arrays = {f"shadow/{name}": array for name, array in self.shadow.items()}
        arrays |= {f"frame/{v.number}": np.frombuffer(v.frame, np.uint8) for v in self.versions}
        rows = [[v.number, v.base, v.digest, v.chain] for v in self.versions]
        return arrays, {"number": self.number, "chain": self.chain, "versions": rows}

    def restore(self, arrays: Arrays, document: Mapping) -> None:
        """Inverse of `state`, in place."""
        self.shadow = {e.name: np.array(arrays[f"shadow/{e.name}"]) for e in self.layout.entries}
        self.versions = [
            Version(number, arrays[f"frame/{number}"].tobytes(), base, digest, chain)
            for number, base, digest, chain in document["versions"]
        ]
        self.number, self.chain = document["number"], document["chain"]
        self.digest, self._snapshot = digest_of(self.shadow, self.layout), None


def pack(update: CatchUp) -> tuple[bytes, dict[str, object]]:
    """(bytes that travel, JSON document that says how to read them)."""
    frames = [update.snapshot] if update.snapshot is not None else [v.frame for v in update.frames]
    rows = [[v.number, v.base, v.digest, v.chain, len(v.frame)] for v in update.frames]
    document: dict[str, object] = {"digest": update.digest, "chain": update.chain, "frames": rows}
    return b"".join(frames), document


def unpack(data: bytes, document: Mapping) -> CatchUp:
    """Inverse of `pack`. Raises FrameError when the lengths do not fit the bytes."""
    rows, versions, at = document["frames"], [], 0
    for number, base, digest, chain, size in rows:
        versions.append(Version(number, data[at : at + size], base, digest, chain))
        at += size
    if rows and at != len(data):
        raise FrameError("length", f"{len(data)} bytes, the versions have {at}")
    snapshot = data if data and not rows else None
    return CatchUp(snapshot, tuple(versions), document["digest"], document["chain"])


def since(update: CatchUp, digests: Collection[str]) -> tuple[str, CatchUp] | None:
    """What is left to apply for a site that has models of these `digests`: (the one to start from, the rest).

    None when none of them is on the way: a gap.
    """
    if update.digest in digests:
        return update.digest, CatchUp(None, (), update.digest, update.chain)
    for at in range(len(update.frames) - 1, -1, -1):
        if update.frames[at].base in digests:
            rest = update.frames[at:]
            return update.frames[at].base, CatchUp(None, rest, update.digest, update.chain)
    return None


def follow(held: Arrays, layout: Layout, update: CatchUp) -> dict[str, np.ndarray]:
    """Site side: apply a catch-up to the model held, which is not looked at for a snapshot.

    Raises FrameError unless the result has the named digest.
    """
    if update.snapshot is not None:
        model = decode(update.snapshot, layout)
    else:
        model = {entry.name: array for entry, array in zip(layout.entries, layout.ordered(held))}
    current = digest_of(model, layout)
    for version in update.frames:
        if version.base != current:
            raise FrameError("gap", f"version {version.number} applies to another model than the one held")
        model = advance(model, version.frame, layout, current)
        current = digest_of(model, layout)
        if current != version.digest:
            raise FrameError("digest", f"version {version.number} does not give the named model")
    if current != update.digest:
        raise FrameError("digest", "the snapshot or chain does not end in the named model")
    return model


def advance(held: Arrays, frame: bytes, layout: Layout, base: str) -> dict[str, np.ndarray]:
    """The model after a version's frame, from the model before it, whose digest is `base`."""
    received = decode(frame, layout, base=base, base_arrays=held)
    if _is_absolute(parse_policy(read_header(frame).policy)):
        return received
    return apply_delta(held, received, layout)


def _is_absolute(policy: Policy) -> bool:
    """Exact codecs send the model itself: a rounded difference added back would not be the model."""
    return all(pipeline.names[0] in ("exact", "lossless", "xor") for _, pipeline in policy.rules)


def difference(theta: Arrays, shadow: Arrays, layout: Layout) -> dict[str, np.ndarray]:
    """theta - shadow in each float tensor's dtype (computed in fp32 or wider); other tensors as they are."""
    result = {}
    for entry in layout.entries:
        new = np.array(theta[entry.name], order="C")
        if entry.dtype in FLOAT_DTYPES:
            wide = np.float64 if entry.dtype == "float64" else np.float32
            change = new.astype(wide) - shadow[entry.name].astype(wide)
            # Of a 0-d array numpy makes a scalar.
            new = np.array(change.astype(DTYPES[entry.dtype]))
        result[entry.name] = new
    return result


def _move(held: dict[str, np.ndarray], delta: Arrays, layout: Layout) -> None:
    """As `apply_delta`, in place, a tensor at a time."""
    for entry in layout.entries:
        one = Layout((entry,))
        name = entry.name
        held[name][...] = apply_delta({name: held[name]}, {name: delta[name]}, one)[name]


def apply_delta(held: Arrays, delta: Arrays, layout: Layout) -> dict[str, np.ndarray]:
    """held + delta, one fp32 (or fp64) addition a value, cast to the tensor's dtype: the same bits
    everywhere."""
    result = {}
    for entry in layout.entries:
        if entry.dtype in FLOAT_DTYPES:
            wide = np.float64 if entry.dtype == "float64" else np.float32
            total = held[entry.name].astype(wide) + delta[entry.name].astype(wide)
            result[entry.name] = np.asarray(total.astype(DTYPES[entry.dtype])).reshape(entry.shape)
        else:
            result[entry.name] = np.array(delta[entry.name])
    return result
