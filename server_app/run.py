"""One run from its first event to its last: folder, lock, join, rounds, checkpoints, export, report.

The order inside a round is what makes a resume exact: commit in memory, checkpoint on disk, then the record in
the event log. A site learns that its update counts only from the next instruction, which is sent after all three.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from flwr.serverapp import Grid

import compression
from server_app import checkpoint
from server_app.export import export
from server_app.joining import Joining
from server_app.mailbox import Mailbox
from server_app.rounds import Engine
from server_app.sites import Registry
from server_app.start import Start, prepare
from strategies import build
from umbel import checkpoints
from umbel.config import Config, to_flat, to_json, to_toml
from umbel.errors import ConfigError, UmbelError
from umbel.fsio import write_atomic
from umbel.telemetry.console import round_line
from umbel.telemetry.history import History
from umbel.telemetry.metrics import write_metrics
from umbel.telemetry.report import write_report
from umbel.telemetry.runfolder import RunFolder, runs_root
from umbel.telemetry.summary import summarise

log = logging.getLogger("umbel.server")


class Locked(UmbelError):
    """Another server process writes this run folder."""


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


def lock(folder: RunFolder) -> IO[str]:
    """Take the writer's lock of a run folder; a second server of the same run is refused."""
    handle = open(folder.path / ".lock", "a+")  # noqa: SIM115  (held for the life of the run)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise Locked(
            f"another server is writing {folder.path}. Wait for it to end, or give this run its own run.output-dir."
        ) from None
    return handle


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
        fault: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.config, self._grid, self._simulated = config, grid, simulated
        self._now, self._sleep, self._fault = now, sleep, fault
        self.history = History()

    def run(self) -> int:
        """Do the whole run; errors end as a `run_finished` event and an exit code."""
        self.folder = run_folder(self.config)
        handle = lock(self.folder)
        writer = logging.FileHandler(self.folder.path / "server.log", encoding="utf-8")
        writer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("umbel").addHandler(writer)
        try:
            return self._locked()
        finally:
            logging.getLogger("umbel").removeHandler(writer)
            writer.close()
            handle.close()

    def _event(self, event: str, /, *, fsync: bool = False, **fields: Any) -> None:
        self.folder.events.write(event, fsync=fsync, **fields)
        self.history.add({"event": event, "t": time.time(), **fields})

    def _locked(self) -> int:
        outcome, reason, code = "failed", "", 1
        try:
            self._begin()
            self._rounds()
            outcome, code = "completed", 0
        except UmbelError as error:
            reason, code = str(error), error.exit_code
            log.error("%s", reason)
        except (KeyboardInterrupt, SystemExit):
            outcome, reason = "stopped", "the server was stopped"
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.exception("the run failed")
        finally:
            self._finish(outcome, reason, code)
        return code

    def _begin(self) -> None:
        config, folder = self.config, self.folder
        for key, spec in (("up", config.compression.up), ("down", config.compression.down)):
            check_codec(f"compression.{key}", spec)
        memory = self._remembered()
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
        registry = Registry(self.start.reference)
        # In memory, a reply is whole or absent; over HTTP a pull may hang and gets a thread of its own.
        poll = 0.05 if self._simulated else 0.25
        mailbox = Mailbox(self._grid, threaded=not self._simulated)
        joining = Joining(
            self._grid,
            mailbox,
            registry,
            run=self.run_id,
            config_json=to_json(config),
            on_event=self._event,
            now=self._now,
            sleep=self._sleep,
            poll_seconds=poll,
            patient=not self._simulated,
        )
        self.engine = Engine(
            config,
            strategy,
            self.start.layout,
            self.start.state,
            mailbox,
            joining,
            run=self.run_id,
            on_event=self._event,
            now=self._now,
            sleep=self._sleep,
            poll_seconds=poll,
            fault=self._fault,
        )
        if memory is not None:
            self._restore(memory, strategy, registry)
            self._complete_log(memory)
        self.writer = checkpoint.Writer(folder.checkpoints, keep=config.run.keep_checkpoints)
        if config.eval.sample_prompt and memory is None:
            self._sample("before")
        joining.wait_for_start(config.clients.minimum, config.clients.start_timeout_seconds)

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
        engine.state, engine.round = memory.state, memory.round
        opened = [row.attempt for row in self.history.rounds if row.round == engine.round + 1]
        engine.attempts_opened = max(opened, default=0)
        engine.norms, engine.arrivals = list(meta["norms"]), list(meta["arrivals"])
        strategy.load_state_dict(memory.strategy)
        registry.reference.update(meta["reference"])
        registry.recall(meta["sites"])

    def _complete_log(self, memory: checkpoints.Memory) -> None:
        """Write the record of the checkpoint's round when the server died between checkpoint and log."""
        known = [row.round for row in self.history.committed]
        if memory.round > max(known, default=0):
            self._event("round_committed", fsync=True, **memory.meta["record"])

    def _memory(self, record: dict[str, Any]) -> checkpoints.Memory:
        engine = self.engine
        return checkpoints.Memory(
            engine.round,
            int(record["attempt"]),
            engine.state,
            engine.strategy.state_dict(),
            {
                "run": self.run_id,
                "config": to_flat(self.config),
                "norms": engine.norms,
                "arrivals": engine.arrivals,
                "reference": engine.registry.reference,
                "sites": engine.registry.memories(),
                "record": record,
            },
        )

    def _rounds(self) -> None:
        config, engine = self.config, self.engine
        while engine.round < config.run.rounds:
            record = engine.run_round()
            every = config.run.checkpoint_every
            if engine.round % every == 0 or engine.round == config.run.rounds:
                began = time.monotonic()
                self._fault("in_checkpoint")
                size = self.writer.save(self._memory(record))
                record["seconds"]["checkpoint"] = time.monotonic() - began
                self._fault("after_checkpoint")
                if size is not None:
                    self._event(
                        "checkpoint_written",
                        round=engine.round,
                        bytes=size,
                        seconds=record["seconds"]["checkpoint"],
                    )
            self._event("round_committed", fsync=True, **record)
            rows = self.history.committed
            log.info("%s", round_line(rows[-1], rows[-2] if len(rows) > 1 else None, config.run.rounds))
        if config.eval.final:
            result = engine.evaluate_sites()
            if result is not None:
                self._event("evaluated", round=engine.round, where="sites", **result)
                log.info("held-out loss after round %d: %.4f", engine.round, result["loss"])
        path = export(config, self.start, engine.state, self.folder, self.history)
        log.info("exported to %s", path)
        if config.eval.sample_prompt:
            self._sample("after")

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
        self._event(
            "run_finished",
            fsync=True,
            outcome=outcome,
            reason=reason,
            rounds=len(self.history.committed),
            exit_code=code,
        )
        self.folder.write_summary(summary(self.history))
        for write in (lambda: write_metrics(self.history, self.folder.metrics_csv), self._report):
            try:
                write()
            except Exception as error:
                log.warning("not written: %s: %s", type(error).__name__, error)

    def _report(self) -> None:
        if self.config.telemetry.report:
            write_report(self.folder.path)


def check_codec(key: str, spec: str) -> None:
    """Raise ConfigError naming `key` when the codec spec is not one."""
    try:
        compression.check_policy(spec)
    except ConfigError as error:
        raise ConfigError(key, f"is no codec: {error}", got=spec, allowed="'exact'") from None


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
