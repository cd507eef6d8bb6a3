"""`umbel run`: resolve, check, submit, follow, tell how it ended.

Everything that can be wrong on this machine is found before Flower is started. A simulation is followed through
the run folder's event log; a federation through Flower, because its run folder is on the server.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from umbel.cli.bundle import make_bundle
from umbel.cli.flower import (
    CONNECTION,
    FlowerError,
    LocalSuperLink,
    flower_env,
    run_facts,
    run_log,
    start_run,
    stop_run,
    tool,
)
from umbel.config import Config, to_toml
from umbel.config.schema import Simulation
from umbel.errors import ConfigError
from umbel.telemetry.console import footer, header, last_round_line
from umbel.telemetry.environment import gpu_names
from umbel.telemetry.events import tail
from umbel.telemetry.history import History
from umbel.telemetry.runfolder import RunFolder, runs_root

# Between two looks at Flower's own status; the event log is looked at much more often.
STATUS_SECONDS = 15.0
FOLLOW_SECONDS = 0.3


def localise(config: Config, *, name: str) -> Config:
    """Return the configuration of a simulation with absolute paths and a run folder."""
    run, data, model, ev = config.run, config.data, config.model, config.eval
    run_name = run.name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(run.output_dir).expanduser().absolute() if run.output_dir else runs_root() / run_name
    source = absolute_if_there(data.source)
    if data.source.startswith(("demo:", "hub:", "stdlib:")) or Path(source).expanduser().exists():
        data = dataclasses.replace(data, source=source)
    else:
        raise ConfigError(
            "data.source",
            "does not exist",
            got=data.source,
            allowed="'demo:', 'stdlib:', a file, a folder, or hub:ORG/NAME",
            remedy="Paths are taken from the folder you are in.",
        )
    return dataclasses.replace(
        config,
        run=dataclasses.replace(
            run, name=run_name, output_dir=str(folder), resume=absolute_if_there(run.resume)
        ),
        data=data,
        model=dataclasses.replace(model, name=absolute_if_there(model.name)),
        eval=dataclasses.replace(ev, central_data=absolute_if_there(ev.central_data)),
    )


def absolute_if_there(text: str) -> str:
    """Return the absolute path of an existing local path; anything else unchanged."""
    if not text or ":" in text.split("/")[0]:
        return text
    path = Path(text).expanduser()
    return str(path.absolute()) if path.exists() else text


def check_room(wanted: Simulation, num_cpus: int, num_gpus: Callable[[], int]) -> int:
    """Return how many virtual sites work at a time; raises ConfigError when none ever fits (Ray would wait on)."""
    if wanted.cpus_per_site > num_cpus:
        raise ConfigError(
            "simulation.cpus-per-site",
            "is more than this machine has, so no site could ever start",
            got=wanted.cpus_per_site,
            allowed=f"1..{num_cpus}",
        )
    fit = num_cpus // wanted.cpus_per_site
    if wanted.gpus_per_site > 0:
        gpus = num_gpus()
        if wanted.gpus_per_site > gpus:
            raise ConfigError(
                "simulation.gpus-per-site",
                f"is more than the {gpus} GPUs that torch sees here, so no site could ever start",
                got=wanted.gpus_per_site,
                allowed=f"0..{gpus}",
                remedy="Set it to 0 to simulate on the CPU.",
            )
        fit = min(fit, int(gpus / wanted.gpus_per_site))
    return min(fit, wanted.sites)


def simulate(config: Config, *, say: Callable[[str], None], verbose: bool = False) -> int:
    """Run a simulation on this machine and follow it; returns the exit code."""
    folder = RunFolder.create(config.run.output_dir)
    offset = folder.events_jsonl.stat().st_size if folder.events_jsonl.exists() else 0
    s = config.simulation
    at_a_time = check_room(s, os.cpu_count() or 1, lambda: len(gpu_names()))
    federation = (
        f"num-supernodes={s.sites} client-resources-num-cpus={s.cpus_per_site} "
        f"client-resources-num-gpus={s.gpus_per_site}"
    )
    with tempfile.TemporaryDirectory(prefix="umbel-") as scratch:
        app = make_bundle(Path(scratch) / "umbel")
        config_file = Path(scratch) / "run.toml"
        config_file.write_text(to_toml(config), "utf-8")
        home = Path(scratch) / "flwr"
        env = flower_env(home)
        say(f"run folder {folder.path}")
        say(f"simulating {s.sites} sites on this machine, {at_a_time} at a time")
        with LocalSuperLink(home, folder.path / "flower.log") as link:
            run_id = start_run(app, CONNECTION, config_file, env=env, federation_config=federation)
            try:
                history = follow(folder, offset, link, run_id, env=env, say=say)
            except KeyboardInterrupt:
                stop_run(run_id, CONNECTION, env=env)
                say(f"stopped. Go on with: umbel run {folder.config_toml} --set run.resume=auto")
                return 130
            if history.outcome == "running" or verbose:
                log_text = run_log(run_id, CONNECTION, env=env)
                (folder.path / "flwr-log.txt").write_text(log_text, "utf-8")
                say(log_text[-3000:])
    say(footer(history))
    if history.outcome != "completed":
        say(f"the run did not complete; logs: {folder.path / 'server.log'}, {folder.path / 'flower.log'}")
        return history.exit_code or 1
    say(f"report {folder.report_html}")
    exported = folder.adapter if folder.adapter.exists() else folder.model
    say(f"exported to {exported}")
    return 0


def follow(
    folder: RunFolder,
    offset: int,
    link: LocalSuperLink,
    run_id: str,
    *,
    env: dict[str, str],
    say: Callable[[str], None],
) -> History:
    """Print what happens until the run's last event, or until Flower says that it is over."""
    history, started, shown = History(), False, 0
    next_status = time.monotonic() + STATUS_SECONDS
    over = False
    while True:
        events, offset = tail(folder.events_jsonl, offset) if folder.events_jsonl.exists() else ([], offset)
        for event in events:
            history.add(event)
            kind = event.get("event")
            if kind == "run_started":
                started = True
                say(header(history))
            elif kind == "site_joined":
                rows, held = event.get("rows_train"), event.get("rows_heldout")
                say(f"site {event.get('site')} joined: {rows} rows, {held} held out")
            elif kind == "site_refused":
                say(f"site {event.get('site')} refused: {event.get('reason')}")
            elif kind == "round_committed":
                say(last_round_line(history))
            elif kind == "sample":
                say(f"{event.get('when')}: {event.get('prompt')!r}\n    {event.get('answer')!r}")
            elif kind == "evaluated":
                say(f"held-out loss after round {event.get('round')}: {event.get('loss'):.4f}")
            elif kind == "update_accepted" and sys.stderr.isatty():
                shown += 1
                sys.stderr.write(f"\r  round {event.get('round')}: {event.get('site')} answered        \r")
        if history.outcome != "running" and started:
            return history
        if over:
            return history
        if time.monotonic() >= next_status:
            next_status = time.monotonic() + STATUS_SECONDS
            status = str(run_facts(run_id, CONNECTION, env=env).get("status", ""))
            # One more look at the log after the end: the last events may have come in between.
            over = status.startswith("finished") or not link.alive()
        time.sleep(FOLLOW_SECONDS)


def federate(config: Config, federation: str, *, say: Callable[[str], None]) -> int:
    """Submit the run to a SuperLink connection of Flower's configuration and follow its log."""
    import subprocess

    env = flower_env()
    with tempfile.TemporaryDirectory(prefix="umbel-") as scratch:
        app = make_bundle(Path(scratch) / "umbel")
        config_file = Path(scratch) / "run.toml"
        config_file.write_text(to_toml(config), "utf-8")
        run_id = start_run(app, federation, config_file, env=env)
        say(f"Flower run {run_id} on {federation!r}")
        try:
            subprocess.run([tool("flwr"), "log", run_id, federation, "--stream"], env=env, check=False)
            while (
                not (facts := run_facts(run_id, federation, env=env)).get("status", "").startswith("finished")
            ):
                time.sleep(2.0)
        except KeyboardInterrupt:
            stop_run(run_id, federation, env=env)
            say("stopped; resume it with --set run.resume=auto and the same run.output-dir")
            return 130
    say(f"Flower run {run_id}: {facts.get('status')} {facts.get('status-details') or ''}")
    return 0 if facts.get("status") == "finished:completed" else 1


def supervise(
    config: Config,
    once: Callable[[Config], int],
    *,
    restarts: int,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run `once`; when it fails for a reason that may pass, run it again from its checkpoint, with back-off."""

    def attempt_once(ready: Config) -> int:
        try:
            return once(ready)
        except FlowerError as error:
            # A SuperLink that is down refuses the submission: as passing a reason as any.
            say(str(error))
            return error.exit_code

    code = attempt_once(config)
    for attempt in range(1, restarts + 1):
        # Wrong settings, data and a spent privacy budget do not mend themselves; 130 is a person at the keyboard.
        if code in (0, 65, 77, 78, 130):
            return code
        wait = min(300.0, 5.0 * 2 ** (attempt - 1))
        say(f"the run ended with {code}; restart {attempt} of {restarts} from its checkpoint in {wait:.0f} s")
        sleep(wait)
        code = attempt_once(dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto")))
    return code
