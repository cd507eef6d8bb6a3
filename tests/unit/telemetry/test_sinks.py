"""Sinks: chosen by name, imported only then, and never able to end a run."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from umbel.errors import ConfigError
from umbel.telemetry import sinks
from umbel.telemetry.history import History

LIBRARIES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"}


def replay(events, open_sinks: sinks.Sinks) -> History:
    history = History()
    for event in events:
        history.add(event)
        open_sinks.take(event, history)
    return history


def test_nothing_is_imported_by_choosing_or_by_importing() -> None:
    code = (
        "import sys; from umbel.telemetry import sinks, prometheus, gauges; sinks.chosen('auto'); "
        f"print([m for m in {[*LIBRARIES.values(), 'prometheus_client', 'torch']} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(sinks.KINDS))
def test_a_sink_without_its_library_is_a_configuration_error(name, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match="pip install") as caught:
        sinks.chosen(name)
    assert caught.value.key == "telemetry.sinks"
    assert sinks.chosen("auto") == []


def test_names(monkeypatch) -> None:
    monkeypatch.setattr(sinks, "installed", lambda kind: True)
    assert sinks.chosen("auto") == ["tensorboard"]
    assert sinks.chosen("none") == sinks.chosen("") == []
    assert sinks.chosen(" wandb, mlflow ,") == ["wandb", "mlflow"]
    with pytest.raises(ConfigError, match="of tensorboard, mlflow, wandb, trackio"):
        sinks.chosen("tensorbord")


def test_tensorboard_holds_the_numbers_of_the_run(two_site_run, tmp_path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    # torch's own writer needs the package `tensorboard`; both write the same files.
    writer = sinks.Sinks(["tensorboard"], tmp_path, "r", {})
    replay(two_site_run, writer)
    assert writer.names == ["tensorboard"]
    writer.close("completed")
    (path,) = (tmp_path / "tensorboard").glob("events.*")
    found = {}
    data = path.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        for value in event.summary.value:
            found[event.step, value.tag] = value.simple_value
    assert found[1, "train/loss"] == 4.5
    assert found[3, "train/loss"] == 3.0
    assert found[0, "heldout/loss"] == 4.0
    assert found[0, "heldout/south/loss"] == 5.0
    assert found[3, "heldout/loss"] == 2.0
    assert found[3, "server/loss"] == pytest.approx(2.2)
    assert found[1, "round/bytes_up"] == 2000.0


@pytest.mark.parametrize("kind", ["mlflow", "wandb", "trackio"])
def test_the_real_library_takes_a_run_where_it_is_installed(
    kind, two_site_run, tmp_path, monkeypatch
) -> None:
    if not sinks.installed(sinks.KINDS[kind]):
        pytest.skip(f"{kind} is not installed")
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)
    writer = sinks.Sinks([kind], tmp_path, "r", {"run.seed": 1})
    replay(two_site_run, writer)
    assert writer.names == [kind]
    writer.close("completed")
    assert any(tmp_path.iterdir())


class Broken:
    """A sink that fails at its second round."""

    made: ClassVar[list[str]] = []

    def __init__(self, folder: Path, run: str, config: dict) -> None:
        self.rounds = 0

    def scalars(self, round_index: int, values: dict) -> None:
        self.rounds += 1
        Broken.made.append(f"{round_index}")
        if self.rounds == 2:
            raise RuntimeError("disk full")

    def close(self, outcome: str) -> None:
        Broken.made.append(outcome)


class Unopenable(Broken):
    def __init__(self, folder: Path, run: str, config: dict) -> None:
        raise OSError("no server")


class Whole(Broken):
    def scalars(self, round_index: int, values: dict) -> None:
        Broken.made.append(f"whole {round_index}")


def test_a_failing_sink_is_said_once_and_dropped_and_the_others_go_on(
    two_site_run, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(sinks, "KINDS", {"broken": Broken, "unopenable": Unopenable, "whole": Whole})
    Broken.made.clear()
    with caplog.at_level(logging.WARNING, "umbel.server"):
        writer = sinks.Sinks(["broken", "unopenable", "whole"], tmp_path, "r", {})
        replay(two_site_run, writer)
        assert writer.names == ["whole"]
        writer.close("failed")
    assert [r.getMessage() for r in caplog.records] == [
        "the sink unopenable is dropped: OSError: no server",
        "the sink broken is dropped: RuntimeError: disk full",
    ]
    assert Broken.made.count("failed") == 1
    assert "whole 3" in Broken.made
