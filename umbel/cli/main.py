"""The command line: one command a verb, errors in words, exit codes that scripts can use.

0 done · 1 failed · 65 data cannot be read · 75 sites or Flower unavailable · 78 a setting is wrong · 130 stopped
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from umbel import __version__
from umbel.cli.site import app as site_app
from umbel.errors import UmbelError

app = typer.Typer(
    help="Train and fine-tune language models across institutions that keep their data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(site_app, name="site")

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="a setting, key=value; may be given again")
]


def say(text: str) -> None:
    """Print one or several lines at once, so that they are seen while the run goes on."""
    print(text, flush=True)


def recipe_path(name: str) -> Path:
    """Return the recipe of that path, or the shipped one of that name."""
    path = Path(name)
    if path.is_file() or path.suffix == ".toml":
        shipped = recipes_folder() / path.name
        return shipped if not path.is_file() and shipped.is_file() else path
    return recipes_folder() / f"{name}.toml"


def recipes_folder() -> Path:
    """Return the folder of shipped recipes: beside the packages in a checkout."""
    return Path(__file__).resolve().parents[2] / "recipes"


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="a recipe's path or name (see `umbel recipes`)")],
    overrides: Overrides = None,
    federation: Annotated[
        str,
        typer.Option(
            help="name of a SuperLink connection of Flower's configuration; without it: simulation here"
        ),
    ] = "",
    supervise: Annotated[int, typer.Option(help="restart a failed run from its checkpoint, this often")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the resolved configuration and stop")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="print Flower's log at the end")] = False,
) -> None:
    """Run a recipe: simulated on this machine, or on a federation of real sites."""
    from umbel.cli import launch
    from umbel.config import resolve, to_toml

    path = recipe_path(recipe)
    config = resolve(path, overrides)
    if not federation:
        config = launch.localise(config, name=path.stem)
    if dry_run:
        say(to_toml(config))
        return

    def once(ready: object) -> int:
        if federation:
            return launch.federate(ready, federation, say=say)  # type: ignore[arg-type]
        return launch.simulate(ready, say=say, verbose=verbose)  # type: ignore[arg-type]

    raise typer.Exit(launch.supervise(config, once, restarts=supervise, say=say))


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="a recipe's path or name")],
    overrides: Overrides = None,
    methods: Annotated[
        str, typer.Option(help="methods to plan, comma separated; default: the recipe's")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="one JSON object, or a list of several")] = False,
    split: Annotated[
        bool, typer.Option("--split", help="compare federated LoRA, QLoRA and split learning instead")
    ] = False,
    link: Annotated[
        float, typer.Option("--link-mbit", "--link", help="a site's link, Mbit/s", min=0.001)
    ] = 100.0,
    step_seconds: Annotated[
        float, typer.Option(help="seconds of a training step, for task pretrain: codecs and their H", min=0.0)
    ] = 0.0,
    latency: Annotated[float, typer.Option(help="with --split: one way, milliseconds", min=0.0)] = 40.0,
    device_memory: Annotated[str, typer.Option(help="with --split: memory of a site's device, as 8G")] = "",
) -> None:
    """Tell what a run will move and hold: bytes a round and site, parameters, memory. Nothing is loaded."""
    if split:
        from umbel.cli.plan_split import plan_split

        raise typer.Exit(
            plan_split(
                recipe_path(recipe),
                overrides,
                link_mbit=link,
                latency_ms=latency,
                device_memory=device_memory,
                as_json=json,
                say=say,
            )
        )
    if step_seconds > 0:
        from umbel.cli.plan_pretrain import plan_pretrain

        pace = {"link_mbit": link, "step_seconds": step_seconds}
        raise typer.Exit(plan_pretrain(recipe_path(recipe), overrides, **pace, as_json=json, say=say))
    from umbel.cli.plan import plan as plan_run

    raise typer.Exit(plan_run(recipe_path(recipe), overrides, methods, as_json=json, say=say))


@app.command()
def compare(
    recipe: Annotated[str, typer.Argument(help="a recipe's path or name")],
    methods: Annotated[str, typer.Option(help="methods, comma separated")],
    seeds: Annotated[int, typer.Option(help="runs of each method, with consecutive seeds", min=1)] = 3,
    output: Annotated[str, typer.Option(help="folder of the runs and the table")] = "",
    disturb: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE: every method runs once more a seed under it; repeatable"),
    ] = None,
    budget_bytes: Annotated[
        float, typer.Option(help="bytes of Quality-under-Budget; 0: the least that a method moved", min=0.0)
    ] = 0.0,
    target_loss: Annotated[
        float, typer.Option(help="loss of Cost-to-Target; 0: the worst final loss of a method", min=0.0)
    ] = 0.0,
    overrides: Overrides = None,
) -> None:
    """Run several methods on one recipe with the same seeds: one table, three protocols, one picture (simulated)."""
    import time

    from umbel.cli import launch
    from umbel.cli.compare import compare as compare_runs
    from umbel.cli.compare import configurations
    from umbel.telemetry.runfolder import runs_root

    path = recipe_path(recipe)
    folder = Path(output) if output else runs_root() / f"compare-{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = folder.expanduser().absolute()
    names = [name.strip() for name in methods.split(",") if name.strip()]
    planned = configurations(path, overrides or [], names, seeds, folder, disturb or [])
    ready = [(m, s, launch.localise(config, name=m)) for m, s, config in planned]
    code = compare_runs(
        ready,
        lambda c: launch.simulate(c, say=say),
        folder,
        say=say,
        disturb=disturb or [],
        budget_bytes=budget_bytes,
        target_loss=target_loss,
    )
    raise typer.Exit(code)


@app.command()
def recipes() -> None:
    """List the shipped recipes with their first comment line."""
    for path in sorted(recipes_folder().glob("*.toml")):
        first = path.read_text("utf-8").splitlines()[:1]
        say(f"{path.stem:<24} {first[0].lstrip('# ') if first else ''}")


@app.command()
def keys(find: Annotated[str, typer.Argument(help="only keys that contain this")] = "") -> None:
    """List every setting with its default and meaning."""
    from umbel.config.keys import kind_of, rule_of
    from umbel.config.load import flat_fields

    for name, (_, item) in flat_fields().items():
        if find in name:
            rule = rule_of(item)
            say(f"{name} = {item.default!r}\n    {rule.doc} ({rule.allowed(kind_of(item))})")


@app.command("ls")
def list_command(root: Annotated[str, typer.Option(help="folder that holds the runs")] = "") -> None:
    """List the runs of this machine."""
    from umbel.cli.show import list_runs_table

    raise typer.Exit(list_runs_table(root or None))


@app.command()
def show(run_dir: Annotated[str, typer.Argument(help="a run folder or a run's name")], last: int = 0) -> None:
    """Show one run: rounds, sites, refusals."""
    from umbel.cli.show import show_run

    raise typer.Exit(show_run(found(run_dir), last=last))


@app.command()
def watch(
    run_dir: Annotated[str, typer.Argument(help="a run folder or a run's name")], once: bool = False
) -> None:
    """Follow a run in a live table."""
    from umbel.cli.watch import watch as watch_run

    raise typer.Exit(watch_run(found(run_dir), once=once))


@app.command()
def report(run_dir: Annotated[str, typer.Argument(help="a run folder or a run's name")]) -> None:
    """Write report.html of a run again and print its path."""
    from umbel.telemetry.report import write_report

    say(str(write_report(found(run_dir))))


@app.command()
def export(
    run_dir: Annotated[str, typer.Argument(help="a run folder or a run's name")],
    merge: Annotated[
        bool, typer.Option("--merge", help="write base and adapter as one Transformers model")
    ] = False,
    output: Annotated[
        str, typer.Option(help="target folder; default: adapter-export/ or merged/ of the run")
    ] = "",
    checkpoint: Annotated[int, typer.Option(help="round of the checkpoint; 0: the newest")] = 0,
    own: Annotated[str, typer.Option(help="folder of a site's own adapter, mixed in by --share")] = "",
    share: Annotated[float, typer.Option(help="share of the own adapter's update", min=0.0, max=1.0)] = 0.5,
    one_rank: Annotated[
        bool, typer.Option("--one-rank", help="no rank or alpha pattern, for servers of many adapters (vLLM)")
    ] = False,
) -> None:
    """Export a run's adapter (or merged model) from its newest checkpoint."""
    from umbel.cli.export import export_run

    target = export_run(
        found(run_dir),
        merge=merge,
        output=output,
        round_index=checkpoint,
        own=own,
        share=share,
        one_rank=one_rank,
    )
    say(str(target))


@app.command()
def doctor(
    recipe: Annotated[str, typer.Argument(help="a recipe whose model and data are checked too")] = "",
    json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    role: Annotated[str, typer.Option(help="server or site: check that service too")] = "",
    settings: Annotated[str, typer.Option(help="the service's settings, as in deploy/profiles")] = "",
    only: Annotated[
        list[str] | None, typer.Option(help="profile, files, network, machine or recipe; may be given again")
    ] = None,
) -> None:
    """Check this machine: versions, memory, disk, caches, model and data; with --role a deployed service."""
    from umbel.cli.doctor import doctor as check

    path = recipe_path(recipe) if recipe else None
    raise typer.Exit(check(path, json=json, role=role, settings=settings, only=only or ()))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def inspect(
    context: typer.Context,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="print the hash of the app bundle of this installation")
    ] = False,
) -> None:
    """Show what left this site: tensors, bytes and metrics. [STATE_DIR] --run --site --last --audit --json"""
    from umbel.cli.inspect import bundle_hash
    from umbel.cli.inspect import inspect as show_sent

    if bundle:
        say(bundle_hash())
        raise typer.Exit(0)
    raise typer.Exit(show_sent(context.args))


@app.command()
def ledger(
    names: Annotated[list[str], typer.Argument(metavar="[verify] RUN", help="a run folder or a run's name")],
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="compute the held-out loss without each site")
    ] = False,
    data: Annotated[str, typer.Option(help="held-out rows; default: eval.central-data of the run")] = "",
    json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Show who contributed what to a run, or verify its signed records: `umbel ledger verify RUN`."""
    from umbel.cli.ledger import leave_one_out as compute
    from umbel.cli.ledger import show_ledger, verify_ledger

    if len(names) == 2 and names[0] == "verify":
        raise typer.Exit(verify_ledger(found(names[1]), as_json=json))
    if len(names) != 1:
        raise typer.BadParameter("give one run, or: verify RUN")
    if leave_one_out:
        code = compute(found(names[0]), data)
        if code:
            raise typer.Exit(code)
    raise typer.Exit(show_ledger(found(names[0]), as_json=json))


@app.command()
def version() -> None:
    """Print the version."""
    say(__version__)


def found(run_dir: str) -> Path:
    """Return the folder of a run named by path or by name; raises DataError in words."""
    from umbel.telemetry.runfolder import find_run

    return find_run(run_dir).path


def main() -> None:
    """Entry point: errors of ours are one line on stderr and an exit code."""
    try:
        app()
    except UmbelError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
