"""One run from its first event to its last: folder, lock, join, rounds, checkpoints, export, report.

The order inside a round is what makes a resume exact: commit in memory, checkpoint on disk, then the record in
the event log. A site learns that its update counts only from the next instruction, which is sent after all three:
the checkpoint is written by a thread while the next round is prepared, and waited for before its messages leave.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid

import compression
from compression.payload import is_exact
from compression.recipes import check as check_recipe
from server_app import audit, checkpoint, privacy
from server_app.asynchronous import AsyncEngine
from server_app.background import Background
from server_app.downlink import check_downlink, split_memory
from server_app.evaluate import CentralEvaluation
from server_app.export import export
from server_app.fence import Fence, Fenced
from server_app.joining import Joining
from server_app.mailbox import Mailbox
from server_app.operator import Operator
from server_app.outlets import Outlets
from server_app.rounds import Engine
from server_app.sites import Registry
from server_app.start import Start, prepare
from server_app.timeouts import check_nesting
from strategies import build
from umbel import checkpoints
from umbel.config import Config, to_flat, to_json, to_toml
from umbel.errors import ConfigError, UmbelError
from umbel.fsio import write_atomic
from umbel.privacy.ledger import BudgetExhausted
from umbel.telemetry.console import last_round_line
from umbel.telemetry.history import History
from umbel.telemetry.metrics import write_metrics
from umbel.telemetry.report import write_report
from umbel.telemetry.runfolder import RunFolder, runs_root
from umbel.telemetry.summary import summarise

log = logging.getLogger("umbel.server")


def run_folder(config: Config) -> RunFolder:
    """Return the folder of the run, created; the name is made from method, model and time when there is none."""
    if config.run.output_dir:
        path = Path(config.run.output_dir).expanduser()
        if not path.is_absolute():
            raise ConfigError(
                "run.output-dir",
                "must be an absolute path: the server process is started in another folder",
                got=config.run.output_dir,
                allowed="a path that begins with /",
                remedy=f"Use {Path.cwd() / path}",
            )
    else:
        path = runs_root() / (config.run.name or time.strftime("run-%Y%m%d-%H%M%S"))
    return RunFolder.create(path)


class Session:
    """Runs a configuration over a grid; `run()` returns the exit code and never leaves a run without a last event."""

    def __init__(
        self,
        config: Config,
        grid: Grid,
        *,
        simulated: bool,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        fault: Callable[[str, int], Any] = lambda point, round_index: None,
    ) -> None:
        self.config, self._grid, self._simulated = config, grid, simulated
        self._now, self._sleep, self._fault = now, sleep, fault
        self.history = History()
        self.outlets = Outlets(config)
        # The record of the round that is committed in memory and not yet durable.
        self._unsettled: dict[str, Any] | None = None
        self._exhausted: BudgetExhausted | None = None
        self._scoring: Background[tuple[int, dict[str, Any] | None]] = Background("umbel-evaluation")

    def run(self) -> int:
        """Do the whole run; errors end as a `run_finished` event and an exit code."""
        self.folder = run_folder(self.config)
        self.fence = Fence(self.folder.path)
        writer = logging.FileHandler(self.folder.path / "server.log", encoding="utf-8")
        writer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("umbel").addHandler(writer)
        try:
            return self._locked()
        finally:
            self.outlets.close("failed")
            logging.getLogger("umbel").removeHandler(writer)
            writer.close()
            self.fence.close()

    def _event(self, event: str, /, *, fsync: bool = False, **fields: Any) -> None:
        record = self.folder.events.write(event, fsync=fsync, **fields)
        self.history.add(record)
        self.outlets.take(record)

    def _locked(self) -> int:
        outcome, reason, code = "failed", "", 1
        fenced = False
        try:
            self._begin()
            try:
                self._rounds()
            finally:
                self._settle()
            outcome, code = "completed", 0
        except Fenced as error:
            # The folder is another server's now: not a line is added to it.
            fenced, code = True, error.exit_code
            log.error("%s", error)
        except UmbelError as error:
            reason, code = str(error), error.exit_code
            outcome = "stopped" if isinstance(error, BudgetExhausted) else outcome
            log.error("%s", reason)
        except (KeyboardInterrupt, SystemExit):
            outcome, reason = "stopped", "the server was stopped"
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.exception("the run failed")
        finally:
            if not fenced:
                self._finish(outcome, reason, code)
        return code

    def _begin(self) -> None:
        config, folder = self.config, self.folder
        check_codecs(config)
        self.outlets.check()
        # In memory, a reply is whole or absent; over HTTP a pull may hang and gets a thread of its own.
        poll = 0.05 if self._simulated else 0.25
        check_nesting(config, poll)
        memory = self._remembered()
        spent = privacy.earlier_releases(config, folder.events_jsonl)
        if memory is None and folder.events_jsonl.exists() and folder.events_jsonl.stat().st_size:
            if (folder.path / "run.json").exists() and list(folder.checkpoints.glob("round-*")):
                raise ConfigError(
                    "run.output-dir",
                    "already holds a run",
                    got=str(folder.path),
                    allowed="an empty folder",
                    remedy="Resume it with --set run.resume=auto, or choose another folder.",
                )
            os.replace(folder.events_jsonl, folder.events_jsonl.with_suffix(".jsonl.old"))
        folder.write_config(to_toml(config))
        folder.write_environment()
        self.start: Start = prepare(config)
        self.run_id = self._run_id(memory)
        self.history = History.read(folder.events_jsonl)
        self._event(
            "run_started",
            run=self.run_id,
            method=config.run.method,
            model=self.start.spec.portable_name,
            task=config.run.task,
            rounds=config.run.rounds,
            num_sites_expected=config.clients.minimum,
            config=to_flat(config),
            trainable_parameters=self.start.layout.numel,
            adapted_modules=len(self.start.modules),
            resumed_from=memory.round if memory else None,
        )
        resumed_from = memory.round if memory else None
        self.outlets.open(folder.path, self.run_id, self.history, resumed_from=resumed_from)
        log.info(
            "run %s: %s on %s, %d rounds, %d numbers exchanged%s",
            self.run_id,
            config.run.method,
            self.start.spec.portable_name,
            config.run.rounds,
            self.start.layout.numel,
            f", resumed after round {memory.round}" if memory else "",
        )
        strategy = build(config, self.start.layout, self.start.scales)
        self.start.state = strategy.initial(self.start.state)
        registry = Registry(self.start.reference)
        mailbox = Mailbox(self._grid, threaded=not self._simulated)
        joining = Joining(
            self._grid,
            mailbox,
            registry,
            run=self.run_id,
            config_json=to_json(config),
            held=not is_exact(config.compression.down),
            on_event=self._event,
            now=self._now,
            sleep=self._sleep,
            poll_seconds=poll,
            patient=not self._simulated,
        )
        self.engine = (AsyncEngine if config.clients.mode == "async" else Engine)(
            config,
            strategy,
            self.start.state,
            mailbox,
            joining,
            run=self.run_id,
            on_event=self._event,
            now=self._now,
            sleep=self._sleep,
            poll_seconds=poll,
            fault=self._fault,
            before_send=self._settle,
            follow_up=config.clients.follow_up and not self._simulated,
            keep_update=audit.keeper(folder.path) if config.telemetry.keep_updates else None,
            operator=Operator(folder.path / "operator.toml", self._event),
            split=self._split(strategy),
        )
        if memory is not None:
            self._restore(memory, strategy, registry)
            self._complete_log(memory)
        elif config.telemetry.keep_updates:
            audit.keep_start(folder.path, self.start.state, self.start.layout)
        if self.engine.privacy is not None:
            rows = [*(memory.meta.get("privacy", []) if memory else []), *spent]
            self.engine.privacy.recall(rows, logged=frozenset(self.history.privacy_releases))
            self.engine.privacy.announce(config.run.rounds)
        self.writer = checkpoint.Writer(
            folder.checkpoints,
            keep=config.run.keep_checkpoints,
            check=self.fence.check,
            half_way=lambda round_index: self._fault("in_checkpoint", round_index),
        )
        self.central = CentralEvaluation(config, self.start) if config.eval.central_data else None
        if self.central is not None and memory is None:
            self._score_centrally()
        if config.eval.sample_prompt and memory is None:
            self._sample("before")
        joining.wait_for_start(config.clients.minimum, config.clients.start_timeout_seconds)

    def _split(self, strategy: Any) -> Any:
        """Return what a split run adds to the engine, None for any other."""
        if self.config.run.task != "split":
            return None
        from server_app.split_round import make_split

        return make_split(self.config, strategy, self._event, self.folder.path)

    def _run_id(self, memory: checkpoints.Memory | None) -> str:
        """Return the identity under which sites keep their state: the same after a resume, new otherwise."""
        note = self.folder.path / "run.json"
        if memory is not None:
            return str(memory.meta["run"])
        run_id = f"{self.config.run.name or self.folder.name}-{uuid.uuid4().hex[:8]}"
        write_atomic(note, json.dumps({"run": run_id}).encode())
        return run_id

    def _remembered(self) -> checkpoints.Memory | None:
        """Return the checkpoint this run goes on from, or None; refuses one of another trajectory."""
        wanted = self.config.run.resume
        if wanted == "none":
            return None
        if wanted == "auto":
            memory = checkpoints.load_newest(self.folder.checkpoints)
        else:
            path = Path(wanted).expanduser()
            if not path.is_dir():
                raise ConfigError(
                    "run.resume",
                    "is not a checkpoint",
                    got=wanted,
                    allowed="'none', 'auto' or a checkpoint's folder",
                )
            memory = checkpoints.read(path)
        if memory is not None:
            changes = checkpoint.trajectory_changes(memory.meta["config"], to_flat(self.config))
            if changes:
                raise ConfigError(
                    "run.resume",
                    f"would change what this run computes ({'; '.join(changes)})",
                    got=wanted,
                    allowed="the settings the run was started with; the number of rounds may change",
                    remedy="Set them back, or start a new run.",
                )
        return memory

    def _restore(self, memory: checkpoints.Memory, strategy: Any, registry: Registry) -> None:
        engine, meta = self.engine, memory.meta
        standing = engine.standing
        standing.state, standing.round = memory.state, memory.round
        for row in self.history.rounds:
            standing.attempts[row.round] = max(row.attempt, standing.attempts.get(row.round, 0))
        standing.norms, standing.arrivals = list(meta["norms"]), list(meta["arrivals"])
        own, shadow = split_memory(memory.strategy)
        strategy.load_state_dict(own)
        if engine.ctx.broadcast is not None:
            engine.ctx.broadcast.restore(shadow, meta["downlink"])
        if engine.ctx.leases is not None:
            engine.ctx.leases.restore(meta["leases"])
        registry.reference.update(meta["reference"])
        registry.recall(meta["sites"])

    def _complete_log(self, memory: checkpoints.Memory) -> None:
        """Write the record of the checkpoint's round when the server died between checkpoint and log."""
        known = [row.round for row in self.history.committed]
        if memory.round > max(known, default=0):
            self._event("round_committed", fsync=True, **memory.meta["record"])
        self.outlets.commit(memory.meta["record"])

    def _memory(self, record: dict[str, Any]) -> checkpoints.Memory:
        engine = self.engine
        # Replaced whole at each commit, as the state is.
        shadow = engine.ctx.broadcast.state()[0] if engine.ctx.broadcast else {}
        return checkpoints.Memory(
            engine.round,
            int(record["attempt"]),
            engine.state,
            # The engine replaces its state whole; what a method or a table changes in place is copied here.
            {name: np.array(value) for name, value in engine.strategy.state_dict().items()} | shadow,
            copy.deepcopy(self._meta(record)),
        )

    def _meta(self, record: dict[str, Any]) -> dict[str, Any]:
        engine = self.engine
        return {
            "run": self.run_id,
            "config": to_flat(self.config),
            "norms": list(engine.standing.norms),
            "arrivals": list(engine.standing.arrivals),
            "reference": engine.registry.reference,
            "sites": engine.registry.memories(),
            "record": record,
            "downlink": engine.ctx.broadcast.state()[1] if engine.ctx.broadcast else {},
            "privacy": engine.privacy.rows() if engine.privacy else [],
            "leases": engine.ctx.leases.state() if engine.ctx.leases else {},
            "fence": self.fence.token,
        }

    def _rounds(self) -> None:
        config, engine = self.config, self.engine
        while engine.round < config.run.rounds:
            try:
                record = engine.run_round()
            except BudgetExhausted as error:
                self._exhausted = error
                break
            self.fence.check()
            every = config.run.checkpoint_every
            self._unsettled = record
            if engine.round % every == 0 or engine.round == config.run.rounds:
                self.writer.submit(self._memory(record))
            else:
                self._settle()
            self._score_centrally()
        self._settle()
        self._take_score()
        if config.eval.final and config.run.task != "split":
            result = engine.evaluate_sites()
            if result is not None:
                self._event("evaluated", round=engine.round, where="sites", **result)
                log.info("held-out loss after round %d: %.4f", engine.round, result["loss"])
        path = export(config, self.start, engine.state, self.folder, self.history)
        log.info("exported to %s", path)
        if config.eval.sample_prompt:
            self._sample("after")
        if self._exhausted is not None:
            raise self._exhausted

    def _score_centrally(self) -> None:
        """Begin to score the state on the server's own held-out rows, every `eval.every` rounds and at the end.

        It runs beside the next round and is at most one evaluation behind.
        """
        every, last = self.config.eval.every, self.engine.round == self.config.run.rounds
        due = last or (every > 0 and self.engine.round % every == 0)
        if self.central is None or not due:
            return
        self._take_score()
        central, state, index = self.central, self.engine.state, self.engine.round
        self._scoring.start(lambda: (index, central.score(state)))

    def _take_score(self) -> None:
        """Write down the evaluation that ran beside the last round; waits for it."""
        index, result = self._scoring.finish() or (0, None)
        if result is not None:
            self._event("evaluated", round=index, where="server", **result)
            log.info("central held-out loss after round %d: %.4f", index, result["loss"])

    def _settle(self) -> None:
        """Wait until the committed round is durable, and only then say that it is committed."""
        record, self._unsettled = self._unsettled, None
        if record is None:
            return
        written = self.writer.wait()
        if written is not None:
            self._fault("after_checkpoint", written.round)
            record["seconds"]["checkpoint"] = written.seconds
            if written.num_bytes is not None:
                self._event(
                    "checkpoint_written",
                    round=written.round,
                    bytes=written.num_bytes,
                    seconds=written.seconds,
                )
        self.outlets.commit(record)
        self._event("round_committed", fsync=True, **record)
        self._note_traffic()
        log.info("%s", last_round_line(self.history))

    def _note_traffic(self) -> None:
        """Write down the bytes on the wire since the last time, by site, phase and direction."""
        engine: Engine | None = getattr(self, "engine", None)
        if engine is None:
            return
        names = {site.node: site.name for site in engine.registry.sites.values()}
        rows = engine.ctx.mailbox.traffic.take(names)
        if rows:
            self._event("traffic", rows=rows)

    def _sample(self, when: str) -> None:
        from server_app.sample import answer

        try:
            text = answer(self.config, self.start, self.engine.state)
        except Exception as error:
            log.warning("no sample answer: %s: %s", type(error).__name__, error)
            return
        self._event("sample", when=when, prompt=self.config.eval.sample_prompt, answer=text)
        log.info("%s: %s -> %s", when, self.config.eval.sample_prompt, text)

    def _finish(self, outcome: str, reason: str, code: int) -> None:
        """Write the last event and everything computed from the events; a failing report fails nothing else."""
        self._note_traffic()
        self._event(
            "run_finished",
            fsync=True,
            outcome=outcome,
            reason=reason,
            rounds=len(self.history.committed),
            exit_code=code,
        )
        self.outlets.close(outcome)
        self.folder.write_summary(summary(self.history))
        for write in (lambda: write_metrics(self.history, self.folder.metrics_csv), self._report):
            try:
                write()
            except Exception as error:
                log.warning("not written: %s: %s", type(error).__name__, error)

    def _report(self) -> None:
        if self.config.telemetry.report:
            write_report(self.folder.path)


def check_codecs(config: Config) -> None:
    """Raise ConfigError naming the key when a codec is none, or is wrong in its direction or with its residual."""
    c = config.compression
    for key, spec in (("compression.up", c.up), ("compression.down", c.down)):
        try:
            compression.check_policy(spec)
        except ConfigError as error:
            allowed = "'exact', 'int8(256,rtn)', ..."
            raise ConfigError(key, f"is no codec: {error}", got=spec, allowed=allowed) from None
    check_downlink(config)
    if any(pipeline.names == ("xor",) for _, pipeline in compression.check_policy(c.up).rules):
        raise ConfigError(
            "compression.up",
            "holds xor, which codes against a base that both ends name; an update names none",
            got=c.up,
            allowed="'lossless', or a lossy codec, which codes the change",
        )
    if not is_exact(c.up):
        for note in check_recipe(c.up, residual=c.feedback > 0, momentum=outer_momentum(config)):
            log.warning("compression.up: %s", note)
    elif c.feedback > 0:
        raise ConfigError(
            "compression.feedback",
            f"has no effect with the exact codec {c.up!r}",
            got=c.feedback,
            allowed="0, or a lossy compression.up",
        )


def outer_momentum(config: Config) -> float:
    """Return the momentum of the server's outer step, 0.0 for a rule without one."""
    moves = config.server.optimizer in ("fedavgm", "nesterov") or config.run.method == "delayed"
    return config.server.momentum if moves else 0.0


def summary(history: History) -> dict[str, Any]:
    """Return what `summary.json` holds: the telemetry's summary and its short names."""
    found = summarise(history)
    short = {
        "rounds": found["rounds_committed"],
        "initial_eval_loss": found["heldout_loss_first"],
        "final_eval_loss": found["heldout_loss_last"],
        "sites": found["num_sites"],
        "site_names": found["sites_contributed"],
    }
    return {**found, **short}
