"""Split learning inside the round engine: opens the endpoint, hands out tokens, joins the two halves.

    begin     one session a chosen site: a token, and the body's half with the state's adapter
    directive what a site's instruction carries: address, token, certificate, sizes
    dead      sites whose stream broke and stayed away: they failed now, not when Flower notices
    advance   transport "messages" with an answer a chunk: the server's answers become the site's next instruction
    join      the site's half + the body's half at the same chunk = one update under whole-model names
    end       tokens are void, the port is closed

A pair counts with both halves or not at all. Nothing waits for another site. What the halves compute is
`server_app.split_half`; what crosses the cut is opaque here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import compression
from compression.payload import decode_update, is_exact
from server_app.split_stream import Endpoint, Session, Standing
from server_app.validate import Rejected, read_metrics
from strategies import Order
from strategies.split import SplitFed
from umbel.config import Config
from umbel.errors import ConfigError
from umbel.messages import Reply
from umbel.split import Frame, FrameKind, SplitError, unpack_frame
from umbel.split_bundle import ADAPTER, EXCHANGED, BundleError, pack_bundle, unpack_bundle
from umbel.telemetry import units

log = logging.getLogger("umbel.server")


class Rescued(NamedTuple):
    """A whole update made of what a dead site had saved."""

    frame: bytes
    order: Order
    tokens: int
    chunks: int
    loss: float


@dataclass
class Pair:
    """One site's two halves in one round. `session` also carries its frames when they come by message."""

    session: Session
    half: Any
    streamed: bool
    messages: int = 0
    fallback: str = ""
    adapter_up_bytes: int = 0
    adapter_down_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


class SplitRounds:
    """One run's split rounds. `body` makes the server's halves and stays warm (`server_app.split_half.Body`)."""

    def __init__(self, config: Config, strategy: SplitFed, body: Any, on_event: Any) -> None:
        self.config, self.strategy, self.body, self._event = config, strategy, body, on_event
        self.endpoint: Endpoint | None = None
        self.pairs: dict[str, Pair] = {}
        self._round = (0, 0)
        self._refused = ""

    # --- before the messages leave ---

    def begin(self, index: int, attempt: int, sites: list[str], state: Mapping[str, np.ndarray]) -> None:
        """Open what this round needs for each site; raises ConfigError when transport 'stream' gets no port."""
        self.end()
        self._round = (index, attempt)
        s = self.config.split
        if s.transport != "messages" and s.gradient in EXCHANGED:
            self._listen(index)
        steps = self.strategy.directives(index - 1)
        self.body.begin(index, attempt, state, steps["first_step"], steps["total_steps"])
        for site in sites:
            half = self.body.open(site)
            session = Session(
                site,
                half.answer,
                num_steps=s.chunk,
                max_frame_bytes=self.body.max_frame_bytes,
                ttl_seconds=s.session_ttl_s,
            )
            if self.endpoint is not None:
                self.endpoint.open(session)
            self.pairs[site] = Pair(session, half, streamed=self.endpoint is not None)

    def _listen(self, index: int) -> None:
        s = self.config.split
        try:
            self.endpoint = Endpoint(
                s.bind,
                certificate=read_certificate(self.config),
                keepalive_seconds=s.keepalive_s,
                max_sessions=s.max_sessions,
                max_frame_bytes=self.body.max_frame_bytes,
            )
        except ConfigError as error:
            if s.transport == "stream":
                raise
            if self._refused != str(error):
                self._refused = str(error)
                log.warning("no split stream: %s Messages are used instead.", error)
            self._event("split_transport", round=index, transport="messages", reason=str(error))

    def directive(self, site: str) -> dict[str, Any]:
        """Return what the instruction of one site says about the cut. It holds the token: it is never logged."""
        s = self.config.split
        found: dict[str, Any] = {
            "transport": s.transport if self.endpoint is not None else "messages",
            "max_frame_bytes": self.body.max_frame_bytes,
        }
        if self.endpoint is not None:
            certificate = read_certificate(self.config)
            found |= {
                "address": s.address or self.endpoint.address,
                "token": self.pairs[site].session.token.hex(),
                "certificate": certificate[1].decode() if certificate else "",
            }
        return found | self.body.directive(site)

    def down(self, site: str) -> dict[str, bytes]:
        """Return what one site is sent besides its half."""
        found = self.body.down(site)
        self.pairs[site].adapter_down_bytes += sum(len(data) for data in found.values())
        return found

    # --- while the round is open ---

    def dead(self) -> list[tuple[str, str]]:
        """Return (site, reason) of sites whose stream is gone for good, each once."""
        now, found = time.monotonic(), []
        for site, pair in self.pairs.items():
            session, away = pair.session, pair.session.broken_seconds(time.monotonic())
            if away > self.config.split.grace_s:
                session.fail(f"its split stream broke {away:.0f} s ago and did not come back")
            elif session.expired(now):
                session.fail("its session's token has expired")
            if session.standing is Standing.FAILED and not pair.facts.get("told"):
                pair.facts["told"] = True
                found.append((site, session.reason))
        return found

    def advance(self, reply: Reply, frame: bytes) -> bytes:
        """Return the body's answers to a bundle of frames; raises Rejected when they break the rules."""
        pair = self._pair(reply.site)
        pair.streamed, pair.messages = False, pair.messages + 1
        why = (read_metrics(reply).get("split") or {}).get("fallback")
        if isinstance(why, str) and not pair.fallback:
            pair.fallback = why[:200]
            log.warning("site %s uses messages: %s", reply.site, pair.fallback)
            self._event(
                "split_transport",
                round=reply.round,
                site=reply.site,
                transport="messages",
                reason=pair.fallback,
            )
        answers: dict[str, bytes] = {}
        try:
            for name, data in unpack_bundle(frame).items():
                asked = unpack_frame(data, max_bytes=self.body.max_frame_bytes)
                if asked.kind is FrameKind.HELLO:
                    answers[name] = pack(pair.half.answer(asked))
                else:
                    answers[name] = pair.session.answer(asked)
                if asked.kind is FrameKind.DONE:
                    pair.session.standing = Standing.DONE
                pair.session.traffic.up_bytes += len(data)
                pair.session.traffic.down_bytes += len(answers[name])
        except (SplitError, BundleError) as error:
            pair.session.fail(str(error))
            raise Rejected("split", str(error)) from error
        return pack_bundle(answers)

    def rescue(self, site: str, order: Order, state: Mapping[str, np.ndarray]) -> Rescued | None:
        """Return the update that a dead site had saved; None when it counts for nothing (split.on-death)."""
        pair = self.pairs[site]
        saved = getattr(pair.half, "saved", None)
        if self.config.split.on_death != "last-saved" or saved is None:
            return None
        try:
            half = decode_update(saved.frame, order.up_layout, "exact", order.known)
        except Rejected:
            return None
        pair.facts["site"] = {"chunks": saved.chunk, "rescued": True}
        frame, whole = self._whole({**state, **half, **saved.body.arrays}, state, self._round[0])
        tokens = saved.body.tokens
        return Rescued(frame, whole, tokens, saved.chunk, saved.loss_sum / max(1, tokens))

    # --- at the end of a site's round ---

    def join(
        self, reply: Reply, frame: bytes, order: Order, state: Mapping[str, np.ndarray]
    ) -> tuple[bytes, Order]:
        """Return (frame, order) of the whole update; raises Rejected when one half is missing or they differ."""
        pair = self._pair(reply.site)
        facts = read_metrics(reply).get("split")
        facts = facts if isinstance(facts, dict) else {}
        pair.facts["site"] = facts
        pair.adapter_up_bytes = len(frame)
        parts = self._parts(reply.site, frame)
        half = decode_update(parts[ADAPTER], order.up_layout, self.config.compression.up, order.known)
        body = self._body_half(reply, pair, facts, parts)
        joined = self._whole({**state, **half, **body}, state, reply.round)
        self._tell(reply, pair)
        return joined

    def _whole(
        self, arrays: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray], index: int
    ) -> tuple[bytes, Order]:
        order = self.strategy.whole(state)
        layout = order.up_layout
        picked = {entry.name: arrays[entry.name] for entry in layout.entries}
        return bytes(compression.encode(picked, layout, "exact", round_index=index)), order

    def _parts(self, site: str, frame: bytes) -> dict[str, bytes]:
        try:
            parts = unpack_bundle(frame)
        except BundleError as error:
            raise Rejected("split", f"the update is no bundle: {error}") from error
        if ADAPTER not in parts:
            raise Rejected("split", "the update holds no adapter")
        return parts

    def _body_half(
        self, reply: Reply, pair: Pair, facts: Mapping[str, Any], parts: Mapping[str, bytes]
    ) -> Mapping[str, np.ndarray]:
        if self.config.split.gradient not in EXCHANGED:
            try:
                pair.half.keep({n: d for n, d in parts.items() if n != ADAPTER})
            except SplitError as error:
                raise Rejected("split", str(error)) from error
            return {}
        if pair.session.standing is not Standing.DONE:
            why = pair.session.reason or "its stream did not end with DONE"
            raise Rejected("split", f"half a pair is no update: {why}", strike=False)
        try:
            found = pair.half.result(int(facts.get("chunks", -1)))
        except (SplitError, ValueError, TypeError) as error:
            raise Rejected("split", f"half a pair is no update: {error}") from error
        if found.tokens != reply.tokens:
            raise Rejected("split", f"the site counts {reply.tokens} tokens, the body saw {found.tokens}")
        return found.arrays

    def _pair(self, site: str) -> Pair:
        pair = self.pairs.get(site)
        if pair is None:
            raise Rejected("split", "no session of this round is open for it", strike=False)
        if pair.session.standing is Standing.FAILED:
            raise Rejected("split", pair.session.reason, strike=False)
        return pair

    def _tell(self, reply: Reply, pair: Pair) -> None:
        row = self.row(reply.site)
        self._event("split_session", round=reply.round, site=reply.site, **row)
        log.info(
            "round %d: site %s: %s chunks over %s, %s up and %s down across the cut",
            reply.round,
            reply.site,
            row.get("chunks", "?"),
            row["transport"],
            units.size(row["cut_up_bytes"]),
            units.size(row["cut_down_bytes"]),
        )

    def row(self, site: str) -> dict[str, Any]:
        """Return what is recorded of one site's session: transport, calls, bytes a category, waiting."""
        pair = self.pairs[site]
        traffic, facts = pair.session.traffic, pair.facts.get("site", {})
        ledger = self._bytes(pair)
        return {
            "transport": "stream" if pair.streamed else "messages",
            "chunks": facts.get("chunks"),
            "calls": traffic.calls,
            "connections": traffic.connections,
            "replayed": traffic.replayed,
            "messages": pair.messages,
            # Uploads that came with the update are no traffic of a session.
            "cut_up_bytes": traffic.up_bytes or ledger["act_up"] + ledger["label_up"],
            "cut_down_bytes": traffic.down_bytes,
            "bytes": ledger,
            "wait_seconds": facts.get("wait_seconds"),
            "round_trip_seconds": facts.get("round_trip_seconds"),
            "fallback": pair.fallback or None,
        }

    @staticmethod
    def _bytes(pair: Pair) -> dict[str, int]:
        """Return bytes by category; what came in one bundle with the site's half is taken out of the half's own."""
        found = dict(pair.half.ledger())
        inside = () if pair.session.traffic.calls else ("act_up", "label_up", "aux_up")
        found["adapter_up"] += max(0, pair.adapter_up_bytes - sum(found[name] for name in inside))
        found["aux_down"] += pair.adapter_down_bytes
        return found

    def record(self) -> dict[str, Any]:
        """Return the round record's part: a row for each site that was asked."""
        return {site: self.row(site) for site in sorted(self.pairs)}

    def end(self) -> None:
        """Void every token and close the port."""
        if self.endpoint is not None:
            self.endpoint.stop()
            self.endpoint = None
        self.pairs = {}


def make_split(config: Config, strategy: SplitFed, on_event: Any, folder: Path) -> SplitRounds:
    """Return a run's split rounds; raises ModelError when the model cannot be cut as the configuration says."""
    from server_app.split_cached import CachedBody
    from server_app.split_half import Body

    names = [entry.name for entry in strategy.layout.entries]
    if config.split.gradient == "none":
        body: Body = CachedBody(config, names, folder / "split-cache")
    elif config.split.gradient in ("aux-loss", "aux-estimate"):
        from server_app.split_aux import AuxBody

        body = AuxBody(config, names, folder / "split-aux")
    else:
        body = Body(config, names)
        check_chunk(config, body.max_frame_bytes)
    if not is_exact(config.compression.down):
        raise ConfigError(
            "compression.down",
            "must be exact with run.task = 'split': both halves start from the same state",
            got=config.compression.down,
            allowed="'exact' or 'lossless'",
        )
    strategy.set_site_names(body.site_names())
    sizes = {e.name: int(np.prod(e.shape)) * 8 for e in strategy.layout.entries}
    body.saved_bytes = sum(sizes[name] for name in strategy.site_names) + 65_536
    if config.split.server_copies == "shared" or config.split.gradient not in EXCHANGED:
        strategy.after = body.after
    return SplitRounds(config, strategy, body, on_event)


def check_chunk(config: Config, frame_bytes: int) -> None:
    """Raise ConfigError when a chunk would not fit into one message and messages are what is asked for."""
    s = config.split
    total = s.chunk * frame_bytes
    if s.transport == "messages" and total > s.max_message_bytes:
        raise ConfigError(
            "split.max-message-bytes",
            f"is less than what a chunk may need ({units.size(total)})",
            got=s.max_message_bytes,
            allowed=f">= {total}",
            remedy="Lower split.chunk, train.batch-size or data.max-length, or raise it.",
        )


def pack(frame: Frame) -> bytes:
    """Return a frame's bytes."""
    from umbel.split import pack_frame

    return pack_frame(frame)


def read_certificate(config: Config) -> tuple[bytes, bytes] | None:
    """Return (key, chain) in PEM, None for plaintext; raises ConfigError naming the file that cannot be read."""
    s = config.split
    if not s.tls_cert:
        return None
    found = []
    for key, name in (("split.tls-key", s.tls_key), ("split.tls-cert", s.tls_cert)):
        try:
            found.append(Path(name).expanduser().read_bytes())
        except OSError as error:
            raise ConfigError(
                key, f"cannot be read ({error.strerror})", got=name, allowed="a PEM file"
            ) from None
    return found[0], found[1]


def limits_text(directive: Mapping[str, Any]) -> str:
    """Return a directive without its secret, for a log."""
    return json.dumps(
        {k: v for k, v in directive.items() if k not in ("token", "certificate")}, sort_keys=True
    )
