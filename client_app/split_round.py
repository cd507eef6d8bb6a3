"""One round of split learning at a site: join facts without the whole model, a stream or messages, the half's update.

    stream     one instruction, one stream, one reply
    messages   with an answer a chunk: every reply carries frames, every next instruction the answers. Nothing is kept in
               memory between two messages: the state at the chunk's start lies on disk, and the chunk is done once
               more with the answers there are (`Replay`); the same numbers come out, so the same frames
               without one (aux-*, none): one instruction, one reply that also carries the activations

`transport = "auto"` dials first and falls back to messages when there is no stream; the reply says why.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from client_app.clock import Clock
from client_app.drill import Drill
from client_app.identity import Identity
from client_app.outgoing import encode_update
from client_app.prepare import decode_state, read_settled, set_threads
from client_app.replies import blank_reply
from client_app.split_stream import Dial, SplitStream, Unreachable
from client_app.state import KEEP_VERSIONS, SiteState, Snapshot
from client_app.tasks.split import Measured, Progress, SplitResult, finish, train_chunks
from client_app.train_round import Watch, peak_memory_bytes
from client_app.workbench import Workbench
from umbel.config import Config
from umbel.data.cursor import Cursor
from umbel.errors import Refusal, RefusalKind
from umbel.faults import FaultPlan
from umbel.messages import Instruction, Reply, parse_json, plain_metrics
from umbel.seeds import derive_seed
from umbel.split import Frame, FrameKind, SplitError, pack_frame, unpack_frame
from umbel.split_bundle import ADAPTER, EXCHANGED, FRAMES, is_bundle, pack_bundle, unpack_bundle
from umbel.tensorfile import dump_tensors, load_tensors

log = logging.getLogger("umbel.site")


class NeedMore(Exception):
    """The chunk cannot go on without answers; `frames` are the questions not asked yet."""

    def __init__(self, frames: dict[str, bytes]) -> None:
        self.frames = frames
        super().__init__(f"{len(frames)} frames wait for an answer")


def key_of(frame: Frame) -> str:
    """Return the name of a frame in a bundle."""
    return f"{frame.kind.name}.{frame.chunk}.{frame.step}"


class Replay:
    """A transport over messages: answers that came are given, questions without one are collected."""

    def __init__(self, answers: dict[str, bytes], max_frame_bytes: int) -> None:
        self.answers, self._limit = answers, max_frame_bytes
        self._queue: list[str] = []
        self._asked: dict[str, bytes] = {}

    def send(self, frame: Frame) -> None:
        """Note a question."""
        key = key_of(frame)
        self._queue.append(key)
        if key not in self.answers:
            self._asked[key] = pack_frame(frame)

    def receive(self) -> Frame:
        """Return the answer to the oldest question; raises NeedMore when it has not come."""
        if not self._queue:
            raise SplitError("an answer was asked for and nothing was sent")
        if self._queue[0] not in self.answers:
            raise NeedMore(self._asked)
        frame = unpack_frame(self.answers[self._queue.pop(0)], max_bytes=self._limit)
        if frame.kind is FrameKind.ABORT:
            raise SplitError(f"the server ended the session: {frame.text()}")
        return frame

    def exchange(self, frame: Frame) -> Frame:
        """Ask and return the answer."""
        self.send(frame)
        return self.receive()

    def greet(self, hello: Frame) -> Frame | None:
        """Return READY; None, with the greeting asked beside the first frames, when it has not come."""
        key = key_of(hello)
        if key in self.answers:
            return unpack_frame(self.answers[key], max_bytes=self._limit)
        self._asked[key] = pack_frame(hello)
        return None


class OpenRound:
    """What a round over messages keeps on the site's disk: the half at the chunk's start, progress, answers."""

    def __init__(self, state: SiteState, instruction: Instruction) -> None:
        self.folder: Path = state.folder / "split-open"
        self.key = f"{instruction.round}-{instruction.attempt}-{instruction.base}"

    def begin(self, received: dict[str, Any]) -> None:
        """Keep the tensors the server sent: the next messages bring only answers."""
        self.drop()
        self.folder.mkdir(parents=True)
        self._write("received.safetensors", dump_tensors(received))

    def received(self) -> dict[str, Any]:
        """Return the tensors kept by `begin`; raises Refusal when there are none."""
        try:
            return load_tensors((self.folder / "received.safetensors").read_bytes())
        except (OSError, ValueError) as error:
            raise Refusal(
                RefusalKind.REFUSED,
                f"the split round in progress is not here any more ({type(error).__name__})",
            ) from None

    def _write(self, name: str, data: bytes) -> None:
        temporary = self.folder / f".{name}"
        temporary.write_bytes(data)
        temporary.replace(self.folder / name)

    def save(self, arrays: dict[str, Any], progress: Progress, answers: dict[str, bytes]) -> None:
        """Write it whole."""
        note = json.dumps({"key": self.key, "progress": progress.plain()}).encode()
        for name, data in (
            ("tensors.safetensors", dump_tensors(arrays)),
            ("answers.bundle", pack_bundle(answers)),
            ("meta.json", note),
        ):
            self._write(name, data)

    def save_answers(self, answers: dict[str, bytes]) -> None:
        """Keep the answers of the open chunk: its next message brings only what is new."""
        self._write("answers.bundle", pack_bundle(answers))

    def load(self) -> tuple[dict[str, Any], Progress, dict[str, bytes]]:
        """Read it; raises Refusal when this round was not begun here."""
        try:
            meta = json.loads((self.folder / "meta.json").read_text("utf-8"))
            if meta["key"] != self.key:
                raise ValueError("another round")
            arrays = load_tensors((self.folder / "tensors.safetensors").read_bytes())
            answers = unpack_bundle((self.folder / "answers.bundle").read_bytes())
        except (OSError, ValueError, KeyError) as error:
            raise Refusal(
                RefusalKind.REFUSED,
                f"the split round in progress is not here any more ({type(error).__name__})",
            ) from None
        return arrays, Progress.from_plain(meta["progress"]), answers

    def drop(self) -> None:
        """Forget it."""
        shutil.rmtree(self.folder, ignore_errors=True)


class SplitSite:
    """One instruction of a split run."""

    def __init__(
        self,
        bench: Workbench,
        plan: FaultPlan,
        instruction: Instruction,
        config: Config,
        site: Identity,
        clock: Clock,
        node_config: Any,
    ) -> None:
        self.bench, self.instruction, self.config = bench, instruction, config
        self.site, self.clock = site, clock
        self.node_config = node_config
        self.directives = parse_json(instruction.directives, "directives")
        self.cut: dict[str, Any] = self.directives.get("split") or {}
        self.state = SiteState(site.state_dir, instruction.run, site.name)
        self.drill = Drill(plan, site.name, instruction.round)
        self.watch = Watch()
        self.facts: dict[str, Any] = {}

    def answer(self, frame: bytes | None) -> tuple[Reply, bytes]:
        """Do what the instruction asks and return (reply, bundle)."""
        if frame is None or not self.cut:
            raise Refusal(RefusalKind.REFUSED, "the instruction carries no half or says nothing of the cut")
        set_threads(self.config.train.threads)
        with self.state.exclusive():
            snapshot, self.found = self.state.select(read_settled(self.instruction))
            parts = unpack_bundle(frame) if is_bundle(frame) else {ADAPTER: frame}
            adapter = parts.pop(ADAPTER, None)
            # Without the half's own tensors it is the answer to what this site asked in mid round.
            going_on = adapter is None
            self.open = OpenRound(self.state, self.instruction)
            half = self._half(adapter, snapshot)
            if not going_on:
                half.take(parts)
            self.watch.lap("prepare")
            self.drill.at("before_train")
            self.drill.between_steps(self.clock)
            try:
                result = self._train(half, snapshot, parts, going_on)
            except NeedMore as more:
                return self._ask(more.frames)
            except SplitError as error:
                raise Refusal(RefusalKind.REFUSED, f"split: {error}") from error
            self.watch.lap("train")
            return self._reply(half, snapshot, result)

    # --- training ---

    def _half(self, frame: bytes | None, snapshot: Snapshot) -> Any:
        from client_app.tasks.split_parts import site_half

        half = site_half(self.bench, self.config, self.site, self.cut)
        if frame is None:
            self.received = self.open.received()
        else:
            self.received = decode_state(self.instruction, frame, half.layout, self.site.state_dir)
        moments = {k: v for k, v in snapshot.arrays.items() if self.config.train.optimizer_state == "keep"}
        half.start(self.received, moments, site=self.site.name, round_index=self.instruction.round)
        return half

    def _train(self, half: Any, snapshot: Snapshot, parts: dict[str, bytes], going_on: bool) -> SplitResult:
        begun = Progress(Cursor(**snapshot.meta["cursor"]) if "cursor" in snapshot.meta else Cursor(0, 0))
        if self.config.split.gradient not in EXCHANGED:
            return half.alone(begun, self.clock, self._options(), self._rows(half))
        if going_on:
            return self._by_message(half, begun, parts)
        if self.cut.get("transport") != "messages":
            try:
                return self._by_stream(half, begun)
            except Unreachable as error:
                if self.cut.get("transport") == "stream":
                    raise
                log.warning("no split stream (%s); messages are used instead", error)
                self.facts["fallback"] = str(error)[:200]
        return self._by_message(half, begun, {})

    def _options(self) -> dict[str, Any]:
        return {
            "site": self.site.name,
            "first_step": int(self.directives["first_step"]),
            "total_steps": int(self.directives["total_steps"]),
            "num_chunks": int(self.directives.get("local_steps", self.config.train.local_steps)),
        }

    def _by_stream(self, half: Any, begun: Progress) -> SplitResult:
        s, options = self.config.split, self._options()
        listed = str(self.node_config.get("split-addresses") or "")
        roots = str(self.node_config.get("split-roots") or "")
        dial = Dial(
            str(self.cut["address"]),
            bytes.fromhex(self.cut["token"]),
            certificate=Path(roots).expanduser().read_bytes() if roots else self.cut["certificate"].encode(),
            keepalive_seconds=s.keepalive_s,
            max_frame_bytes=int(self.cut["max_frame_bytes"]),
            window=s.chunk,
            connect_seconds=s.connect_s,
            patience_seconds=s.grace_s,
        ).check(tuple(part.strip() for part in listed.split(",") if part.strip()))
        with SplitStream(dial, expired=lambda: self.clock.expired) as stream:
            half.check_ready(stream.greet(self._hello(half)))
            measured = Measured(stream)
            progress = train_chunks(
                half, self._rows(half), self.config, self.clock, measured, begun, **options
            )
            result = finish(half, measured, progress, options["num_chunks"])
        self.facts |= {"transport": "stream", **measured.facts(), **asdict(stream.traffic)}
        return result

    def _by_message(self, half: Any, begun: Progress, parts: dict[str, bytes]) -> SplitResult:
        """Go on with the chunk in progress as far as the answers reach; raises NeedMore with the next questions."""
        options, progress = self._options(), begun
        answers: dict[str, bytes] = {}
        if parts:
            arrays, progress, answers = self.open.load()
            half.load(arrays)
            answers |= parts
        else:
            self.open.begin(self.received)
            self.open.save(half.save(), progress, {})
        limit = int(self.cut["max_frame_bytes"])
        while True:
            replay = Replay(answers, limit)
            try:
                if progress.chunk == 0:
                    ready = replay.greet(self._hello(half))
                    if ready is not None:
                        half.check_ready(ready)
                before = progress.chunk
                progress = train_chunks(
                    half, self._rows(half), self.config, self.clock, replay, progress, only=1, **options
                )
                if progress.chunk > before:
                    answers = {}
                    self.open.save(half.save(), progress, answers)
                    continue
                result = finish(half, replay, progress, options["num_chunks"])
            except NeedMore:
                self.open.save_answers(answers)
                raise
            self.open.drop()
            self.facts |= {"transport": "messages"}
            return result

    def _hello(self, half: Any) -> Frame:
        return Frame(FrameKind.HELLO, 0, 0, half.hello())

    def _rows(self, half: Any) -> list[Any]:
        return self.bench.data(self.config, self.site, half.tokenizer).train

    # --- answers ---

    def _ask(self, frames: dict[str, bytes]) -> tuple[Reply, bytes]:
        metrics = plain_metrics({"split": self.facts})
        reply = blank_reply(self.instruction, self.site.name, payload=FRAMES, metrics=metrics)
        return reply, pack_bundle(frames)

    def _reply(self, half: Any, snapshot: Snapshot, result: SplitResult) -> tuple[Reply, bytes]:
        if result.tokens == 0:
            raise Refusal(RefusalKind.NO_DATA, "no supervised token was trained on")
        encoded = encode_update(
            self.instruction,
            self.drill.spoil(result.arrays),
            half.layout,
            self.received,
            self.state.folder,
            feedback=float(self.directives.get("feedback", 0.0)),
            seed=derive_seed(int(self.directives.get("codec_seed", 0)), self.instruction.site),
        )
        self.watch.lap("encode")
        kept = result.moments if self.config.train.optimizer_state == "keep" else {}
        self.state.stage(
            self.instruction.round, self.instruction.attempt, {"cursor": asdict(result.cursor)}, kept
        )
        keep = max(KEEP_VERSIONS, self.config.run.checkpoint_every + 3)
        self.state.prune(read_settled(self.instruction), keep=keep)
        metrics = {
            "seconds": self.watch.seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "state_found": self.found,
            "epoch": result.cursor.epoch,
            "split": {**self.facts, **result.facts, "chunks": result.chunks},
        }
        loss = float("nan") if self.drill.at("before_send") else result.loss
        self.drill.on_the_way()
        reply = blank_reply(
            self.instruction,
            self.site.name,
            weight=float(result.tokens),
            tokens=result.tokens,
            steps=result.chunks,
            loss=loss,
            partial=result.partial,
            payload=encoded.payload,
            metrics=plain_metrics(metrics),
        )
        return reply, pack_bundle({ADAPTER: encoded.frame, **half.uploads()})


def join_facts(bench: Workbench, config: Config, site: Identity) -> dict[str, Any]:
    """Return what a site says when it joins a split run; the whole model is described and never loaded."""
    from client_app.tasks.split_parts import described_parts, site_half
    from umbel.models.fingerprint import adapter_fingerprint, tokenizer_fingerprint

    began = time.monotonic()
    half = site_half(bench, config, site, {})
    whole = described_parts(config)
    data = bench.data(config, site, half.tokenizer)
    return {
        "rows_train": len(data.train),
        "rows_heldout": len(data.heldout),
        "counters": data.counters,
        "tokenizer": tokenizer_fingerprint(half.tokenizer),
        "adapter": adapter_fingerprint(whole.settings, whole.modules),
        "layout": whole.layout.digest(),
        "adapted_modules": len(whole.modules),
        "trainable_parameters": whole.layout.numel,
        "device": half.device,
        "rank": site.rank,
        "seconds": {"load": time.monotonic() - began},
    }
