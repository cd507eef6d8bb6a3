"""`umbel site`: run this machine as a site, and see what its worker does.

The commands start modules of the site's own room in a process of their own: this one stays without Flower.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Run this machine as a site; see what its worker does.")

START = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=START)
def start(context: typer.Context) -> None:
    """Run a SuperNode that keeps the model loaded and starts no process for a message.

    Takes the arguments of flower-supernode. Where the installed Flower does not fit, the stock one is run.
    """
    os.execv(sys.executable, [sys.executable, "-m", "client_app.resident.site", *context.args])


@app.command()
def status(
    state_dir: Annotated[
        list[str] | None,
        typer.Argument(help="state folders of the sites; default: $UMBEL_STATE or ~/.umbel/state"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON list")] = False,
) -> None:
    """Show the resident workers of this machine: run, round, step, tokens a second, memory, time left."""
    default = os.environ.get("UMBEL_STATE") or str(Path.home() / ".umbel" / "state")
    command = [sys.executable, "-m", "client_app.resident.progress", *(state_dir or [default])]
    raise typer.Exit(subprocess.call([*command, "--json"] if json else command))


@app.command()
def metrics(
    state_dir: Annotated[
        list[str] | None,
        typer.Argument(help="state folders of the sites; default: $UMBEL_STATE or ~/.umbel/state"),
    ] = None,
    port: Annotated[int, typer.Option(help="TCP port; 0: a free one")] = 9102,
    host: Annotated[
        str, typer.Option(help="address; anything but loopback is readable by others")
    ] = "127.0.0.1",
) -> None:
    """Serve /metrics for Prometheus from the records in the state folders, until interrupted."""
    import threading

    from umbel.telemetry.prometheus import serve_sites

    default = os.environ.get("UMBEL_STATE") or str(Path.home() / ".umbel" / "state")
    endpoint = serve_sites(host, port, [Path(p).expanduser() for p in state_dir or [default]])
    print(f"http://{host}:{endpoint.port}/metrics", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        endpoint.close()
