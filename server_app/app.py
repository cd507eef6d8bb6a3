"""The Flower ServerApp: parse the run config, run it, fail loudly."""

from __future__ import annotations

import logging
import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from umbel.config import from_run_config
from umbel.errors import UmbelError
from umbel.faults import SERVER, FaultPlan

app = ServerApp()


class RunFailed(RuntimeError):
    """Raised at the end of a failed run, so that Flower shows it as failed and not as completed."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configuration that came with the Flower run."""
    set_up_logging()
    from server_app.run import Session

    log = logging.getLogger("umbel.server")
    try:
        config = from_run_config(context.run_config)
        plan = FaultPlan.from_env()
        session = Session(
            config,
            grid,
            simulated=type(grid).__name__ == "InMemoryGrid",
            fault=lambda point, round_index: plan.fire(SERVER, round_index, point),
        )
        code = session.run()
    except UmbelError as error:
        log.error("%s", error)
        raise RunFailed(str(error)) from None
    if code:
        raise RunFailed(session.history.reason or f"the run ended with exit code {code}")


def set_up_logging() -> None:
    """Send our log lines where Flower's go: `flwr log` shows them, print does not."""
    logger = logging.getLogger("umbel")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
