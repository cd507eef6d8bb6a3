"""Where else the numbers of a run go: TensorBoard, MLflow, Weights & Biases, Trackio, behind one small protocol.

A sink takes scalars by round and is closed once. Its library is imported when it is chosen (`telemetry.sinks`) and
never before. A library that is chosen and not installed is a configuration error before the run starts; a sink that
fails later is said once and dropped, and the run goes on: the event log is the record, a sink is a copy.
Nothing leaves the server by itself: MLflow and Trackio write below the run folder unless their own environment
variables name a server, W&B runs offline unless WANDB_MODE says otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from umbel.errors import ConfigError
from umbel.telemetry.history import History
from umbel.telemetry.metrics import rows_of

log = logging.getLogger("umbel.server")


class Sink(Protocol):
    """One place scalars are copied to."""

    def scalars(self, round_index: int, values: Mapping[str, float]) -> None:
        """Take the values of one round, named `split/metric`."""
        ...

    def close(self, outcome: str) -> None:
        """Finish; `outcome` is that of the run."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the run folder."""

    modules = ("torch.utils.tensorboard", "tensorboardX")
    package = "tensorboardX"

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        self._writer = first_of(self.modules).SummaryWriter(str(folder / "tensorboard"))

    def scalars(self, round_index: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round_index)
        self._writer.flush()

    def close(self, outcome: str) -> None:
        self._writer.close()


class MLflow:
    """A run of the experiment "umbel"; `mlruns/` of the run folder unless MLFLOW_TRACKING_URI is set."""

    modules = ("mlflow",)
    package = "mlflow-skinny"

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        self._mlflow = first_of(self.modules)
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            # Newer versions want to be asked before they write plain files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self._mlflow.set_tracking_uri((folder / "mlruns").as_uri())
        self._mlflow.set_experiment("umbel")
        self._mlflow.start_run(run_name=run)
        self._mlflow.log_params({k.replace("/", "."): v for k, v in config.items()})

    def scalars(self, round_index: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=round_index)

    def close(self, outcome: str) -> None:
        self._mlflow.end_run("FINISHED" if outcome == "completed" else "FAILED")


class Wandb:
    """A W&B run of the project "umbel", offline unless WANDB_MODE is set."""

    modules = ("wandb",)
    package = "wandb"

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE") or "offline"
        self._run = first_of(self.modules).init(
            project="umbel", name=run, config=dict(config), dir=str(folder), mode=mode
        )

    def scalars(self, round_index: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round_index)

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "completed" else 1)


class Trackio:
    """A Trackio run of the project "umbel"; `trackio/` of the run folder unless TRACKIO_DIR is set."""

    modules = ("trackio",)
    package = "trackio"

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        # Trackio reads the variable when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        self._trackio = first_of(self.modules)
        self._trackio.init(project="umbel", name=run, config=dict(config))

    def scalars(self, round_index: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=round_index)

    def close(self, outcome: str) -> None:
        self._trackio.finish()


KINDS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": Wandb,
    "trackio": Trackio,
}


def first_of(modules: tuple[str, ...]) -> Any:
    """Import and return the first module that can be; ImportError of the last one otherwise."""
    for name in modules[:-1]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module(modules[-1])


def installed(kind: Any) -> bool:
    """Tell whether a sink's library is there, without importing it."""
    if importlib.util.find_spec(kind.modules[-1]) is not None:
        return True
    # torch's writer is a thin shell around the package `tensorboard`.
    return kind is TensorBoard and importlib.util.find_spec("tensorboard") is not None


def chosen(text: str) -> list[str]:
    """Return the sinks that `telemetry.sinks` names: "auto" is TensorBoard when installed, "none" nothing.

    Raises ConfigError for a name that is none, or a library that is not installed.
    """
    if text.strip() in ("", "none"):
        return []
    if text.strip() == "auto":
        return ["tensorboard"] if installed(TensorBoard) else []
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        kind: Any = KINDS.get(name)
        if kind is None:
            raise ConfigError(
                "telemetry.sinks",
                "names what is no sink",
                got=name,
                allowed=f"'auto', 'none', or of {', '.join(KINDS)}, comma separated",
            )
        if not installed(kind):
            raise ConfigError(
                "telemetry.sinks",
                "names a sink whose library is not installed",
                got=name,
                allowed="a sink that is installed on the server",
                remedy=f"pip install {kind.package}",
            )
    return names


class Sinks:
    """All sinks of a run; whatever one of them raises ends that one alone."""

    def __init__(self, names: list[str], folder: Path, run: str, config: Mapping[str, Any]) -> None:
        self._open: dict[str, Sink] = {}
        for name in names:
            self._try(name, partial(self._add, name, folder, run, config))

    def _add(self, name: str, *arguments: Any) -> None:
        self._open[name] = KINDS[name](*arguments)

    def take(self, event: Mapping[str, Any], history: History) -> None:
        """Pass on what an event made known; `history` has it already."""
        if not self._open:
            return
        if event.get("event") not in ("round_committed", "evaluated"):
            return
        newest = int(event.get("round") or 0)
        if event["event"] == "round_committed":
            # The held-out loss that comes with round r is that of the state after round r - 1.
            self._pass_on(newest - 1, rows_of(history, newest - 1, None))
        row = next((row for row in history.committed[-1:] if row.round == newest), None)
        self._pass_on(newest, rows_of(history, newest, row))

    def _pass_on(self, index: int, rows: Iterable[tuple[int, str, str, float]]) -> None:
        values = {f"{split.replace(':', '/')}/{metric}": value for _, split, metric, value in rows}
        for name, sink in list(self._open.items()) if values else []:
            self._try(name, partial(sink.scalars, index, values))

    def close(self, outcome: str) -> None:
        """Finish all of them."""
        for name, sink in list(self._open.items()):
            self._try(name, partial(sink.close, outcome))
        self._open.clear()

    @property
    def names(self) -> list[str]:
        """The sinks that still work."""
        return list(self._open)

    def _try(self, name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            self._open.pop(name, None)
            log.warning("the sink %s is dropped: %s: %s", name, type(error).__name__, error)
