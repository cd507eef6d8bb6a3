"""A sum of which nobody sees a summand, and which survives sites that fall silent at any stage.

    advertise  u -> server    two public keys: one for sealing shares, one for masks
    share      u -> server    t-of-n shares of its mask key and of its own seed b_u, sealed for each v; hash of b_u
    mask       u -> server    y_u = r_u + mask(b_u) + sum_{v > u} mask(k_uv) - sum_{v < u} mask(k_uv)   mod 2^m
    unmask     u -> server    for each v that sent y_v its share of b_v, for each other its share of v's mask key

k_uv is agreed between the mask keys of u and v, r_u is `secure_sum.residues`. The server takes mask(b_u) off for
those that sent, and for those that did not, whose keys it can then reconstruct, the masks that found no partner. What
remains is exactly the fixed-point sum of those that sent. With fewer than t sites at any stage it halts and learns
nothing. A site answers `unmask` once, for one set: never both shares of one peer, or its input would be bare.
(Bonawitz et al. 2017, doi 10.1145/3133956.3133982, Figure 4 without the signatures.)

What it does not do. It is *not wired to the round engine*: a round there has one message each way and this takes
four; the parts here are pure and run in one process. There are no signatures on the keys, so the server is trusted to
hand out the right ones (honest but curious; t > 2n/3 is the default because it is needed once there are). A site that
lies about its own input is not noticed, and norms cannot be checked behind masks. Cost: n - 1 key agreements and
masks a site, so n <= 32 or so.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from compression.errors import EncodeError, FrameError
from compression.secure_sum import SumPlan, decode_sum, residues
from compression.secure_sum_masks import add_mask, agree, new_pair, public_of, seal, unseal
from compression.secure_sum_shares import SECRET_BYTES, SHARE_BYTES, combine, split
from umbel.errors import ConfigError, UmbelError

STAGES = ("advertise", "share", "mask", "unmask")


class SecureSumHalted(UmbelError):
    """Too few sites are left, or something does not fit together: no sum, and nothing was revealed."""


@dataclass(frozen=True)
class Terms:
    """What all agree on beforehand. `session` must never repeat; `members` are the names of all that may take part."""

    session: str
    members: tuple[str, ...]
    numel: int
    plan: SumPlan
    threshold: int = 0

    def __post_init__(self) -> None:
        n = len(self.members)
        if len(set(self.members)) != n or n < 2:
            raise ConfigError(
                "secure_sum.members", "must be two or more different names", got=self.members, allowed=">= 2"
            )
        if n > self.plan.max_sites:
            raise ConfigError(
                "secure_sum.members",
                "are more than the plan was made for",
                got=n,
                allowed=str(self.plan.max_sites),
            )
        if not self.threshold:
            object.__setattr__(self, "threshold", 2 * n // 3 + 1)
        if not n / 2 < self.threshold <= n:
            raise ConfigError(
                "secure_sum.threshold",
                "must be a majority, or two halves could be asked for different shares",
                got=self.threshold,
                allowed=f"{n // 2 + 1}..{n}",
            )

    def point(self, name: str) -> int:
        """Return the point at which a member's shares are taken."""
        return sorted(self.members).index(name) + 1

    def require(self, stage: str, names: Iterable[str]) -> set[str]:
        """Return the names as a set; raises SecureSumHalted for strangers or fewer than the threshold."""
        found = set(names)
        if strangers := found - set(self.members):
            raise SecureSumHalted(f"{stage}: {sorted(strangers)[0]!r} is no member of {self.session!r}")
        if len(found) < self.threshold:
            raise SecureSumHalted(
                f"{stage}: {len(found)} of {len(self.members)} sites are left, {self.threshold} are needed"
            )
        return found


class Keys(NamedTuple):
    """What a site advertises, 32 bytes each."""

    sealing: bytes
    masking: bytes


class Shares(NamedTuple):
    """What a site hands out: the hash of its seed, and for each peer a sealed pair of shares."""

    commitment: bytes
    sealed: dict[str, bytes]


class Revealed(NamedTuple):
    """What a site says in the last stage: shares by the name of the peer they belong to."""

    seeds: dict[str, int]
    keys: dict[str, int]


class Member:
    """One site in one session. Methods are called once each, in the order of the stages."""

    def __init__(self, name: str, terms: Terms) -> None:
        self.name, self.terms = name, terms
        self._sealing, self._masking = new_pair(), new_pair()
        self._seed = secrets.token_bytes(SECRET_BYTES)
        self._keys: dict[str, Keys] = {}
        self._held: dict[str, tuple[int, int]] = {}
        self._sharing: set[str] = set()
        self._masked = self._answered = False

    def advertise(self) -> Keys:
        """Return this site's public keys."""
        return Keys(self._sealing.public, self._masking.public)

    def share(self, keys: Mapping[str, Keys]) -> Shares:
        """Return sealed shares for every site in `keys`. Raises SecureSumHalted when they are too few or not ours."""
        self.terms.require("share", keys)
        if self._keys or keys.get(self.name) != self.advertise():
            raise SecureSumHalted(f"share: {self.name} was not offered its own keys, or was asked twice")
        if len({k.masking for k in keys.values()}) < len(keys):
            raise SecureSumHalted("share: two sites have one key")
        self._keys = dict(keys)
        points = {name: self.terms.point(name) for name in keys}
        seed = split(self._seed, self.terms.threshold, points.values())
        key = split(self._masking.secret, self.terms.threshold, points.values())
        self._held[self.name] = seed[points[self.name]], key[points[self.name]]
        sealed = {
            name: seal(self._pipe(self.name, name), _pack(seed[point], key[point]))
            for name, point in points.items()
            if name != self.name
        }
        return Shares(hashlib.sha256(self._seed).digest(), sealed)

    def mask(
        self, x: np.ndarray, sealed: Mapping[str, bytes], *, weight: int = 1, seed: int = 0
    ) -> np.ndarray:
        """Return y_u, (numel,) uint64. `sealed` are the shares that came for this site, by sender.

        Raises EncodeError for a NaN, a value out of range or a wrong size: then nothing of this site is sent.
        """
        self._sharing = self.terms.require("mask", {*sealed, self.name})
        if self._masked:
            raise SecureSumHalted(f"mask: {self.name} was asked twice")
        for sender, data in sealed.items():
            self._held[sender] = _unpack(unseal(self._pipe(sender, self.name), data))
        values = residues(x, self.terms.plan, weight=weight, seed=seed)
        if values.size != self.terms.numel:
            raise EncodeError("", f"{values.size} values, {self.terms.numel} were agreed on.")
        self._masked = True
        add_mask(values, self._seed, self.terms.plan, 1)
        for peer in sorted(self._sharing - {self.name}):
            key = mask_key(self.terms, self._masking.secret, self._keys[peer].masking, self.name, peer)
            add_mask(values, key, self.terms.plan, 1 if self.name < peer else -1)
        return values

    def unmask(self, sent: Iterable[str]) -> Revealed:
        """Return this site's shares, given who sent a masked value. Answers once; raises SecureSumHalted otherwise."""
        alive = self.terms.require("unmask", sent)
        if self._answered or not self._masked or not alive <= self._sharing or self.name not in alive:
            raise SecureSumHalted(f"unmask: {self.name} answers once, after sending, for sites that shared")
        self._answered = True
        return Revealed(
            {name: self._held[name][0] for name in sorted(alive)},
            {name: self._held[name][1] for name in sorted(self._sharing - alive)},
        )

    def _pipe(self, sender: str, receiver: str) -> bytes:
        peer = receiver if sender == self.name else sender
        return agree(
            self._sealing.secret, self._keys[peer].sealing, self.terms.session, "share", sender, receiver
        )


@dataclass
class Collector:
    """The server's side of one session; methods are called once each, in the order of the stages."""

    terms: Terms
    keys: dict[str, Keys] = field(default_factory=dict)
    commitments: dict[str, bytes] = field(default_factory=dict)
    sharing: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)

    def take_keys(self, keys: Mapping[str, Keys]) -> dict[str, Keys]:
        """Return what every site is told in `share`."""
        self.terms.require("advertise", keys)
        self.keys = dict(keys)
        return self.keys

    def take_shares(self, shares: Mapping[str, Shares]) -> dict[str, dict[str, bytes]]:
        """Return for each site that shared the sealed shares that are for it, by sender."""
        self.sharing = self.terms.require("share", shares)
        self.commitments = {name: s.commitment for name, s in shares.items()}
        for name, s in shares.items():
            if set(s.sealed) != set(self.keys) - {name}:
                raise SecureSumHalted(f"share: {name} did not share with exactly the others")
        return {
            name: {sender: s.sealed[name] for sender, s in shares.items() if sender != name}
            for name in self.sharing
        }

    def take_masked(self, masked: Mapping[str, np.ndarray]) -> set[str]:
        """Add up the masked values and return who sent one: what every site is told in `unmask`."""
        self.sent = self.terms.require("mask", masked)
        if not self.sent <= self.sharing:
            raise SecureSumHalted("mask: a value of a site that shared nothing cannot be unmasked")
        bits = np.uint64(self.terms.plan.mask)
        self._total = np.zeros(self.terms.numel, np.uint64)
        for name in sorted(masked):
            part = masked[name]
            if part.dtype != np.uint64 or part.shape != (self.terms.numel,) or (part & ~bits).any():
                raise SecureSumHalted(f"mask: the value of {name} is not {self.terms.numel} residues")
            self._total = (self._total + part) & bits
        return self.sent

    def finish(self, revealed: Mapping[str, Revealed]) -> np.ndarray:
        """Return the sum over `sent`, (numel,) float64. Raises SecureSumHalted rather than return a wrong one."""
        self.terms.require("unmask", revealed)
        plan, total = self.terms.plan, self._total.copy()
        try:
            for name in sorted(self.sent):
                seed = self._combine({who: r.seeds.get(name) for who, r in revealed.items()})
                if hashlib.sha256(seed).digest() != self.commitments[name]:
                    raise FrameError("shares", f"the seed of {name} is not the one it committed to")
                add_mask(total, seed, plan, -1)
            for gone in sorted(self.sharing - self.sent):
                secret = self._combine({who: r.keys.get(gone) for who, r in revealed.items()})
                if public_of(secret) != self.keys[gone].masking:
                    raise FrameError("shares", f"the key of {gone} is not the one it advertised")
                for name in sorted(self.sent):
                    key = mask_key(self.terms, secret, self.keys[name].masking, gone, name)
                    add_mask(total, key, plan, -1 if name < gone else 1)
            return decode_sum(total, plan)
        except FrameError as error:
            raise SecureSumHalted(f"unmask: {error}") from error

    def _combine(self, shares: Mapping[str, int | None]) -> bytes:
        known = {self.terms.point(who): share for who, share in shares.items() if share is not None}
        return combine(known, self.terms.threshold)


def mask_key(terms: Terms, secret: bytes, public: bytes, one: str, other: str) -> bytes:
    """Return the key of the mask between two sites: the same from either end."""
    return agree(secret, public, terms.session, "mask", *sorted((one, other)))


def run_in_process(
    inputs: Mapping[str, np.ndarray], terms: Terms, gone: Mapping[str, str] | None = None
) -> tuple[np.ndarray, set[str]]:
    """Play a session in one process: (sum, who is in it). `gone` maps a name to the stage from which it is silent.

    A site whose input cannot be encoded is silent from `mask` on. Raises SecureSumHalted.
    """
    gone = dict(gone or {})

    def here(stage: str, names: Iterable[str]) -> list[str]:
        at = STAGES.index(stage)
        return [n for n in sorted(names) if n not in gone or STAGES.index(gone[n]) > at]

    members = {name: Member(name, terms) for name in inputs}
    server = Collector(terms)
    keys = server.take_keys({n: members[n].advertise() for n in here("advertise", members)})
    mail = server.take_shares({n: members[n].share(keys) for n in here("share", keys)})
    masked = {}
    for name in here("mask", mail):
        try:
            masked[name] = members[name].mask(inputs[name], mail[name])
        except EncodeError:
            gone[name] = "mask"
    sent = server.take_masked(masked)
    return server.finish({n: members[n].unmask(sent) for n in here("unmask", sent)}), sent


def _pack(seed: int, key: int) -> bytes:
    return seed.to_bytes(SHARE_BYTES, "big") + key.to_bytes(SHARE_BYTES, "big")


def _unpack(data: bytes) -> tuple[int, int]:
    if len(data) != 2 * SHARE_BYTES:
        raise FrameError("shares", f"{len(data)} bytes of shares, {2 * SHARE_BYTES} expected")
    return int.from_bytes(data[:SHARE_BYTES], "big"), int.from_bytes(data[SHARE_BYTES:], "big")
