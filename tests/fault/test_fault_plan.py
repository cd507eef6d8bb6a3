"""The fault plan itself: what is planned fires once, is written down first, and anything else is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from client_app.clock import Clock
from client_app.drill import Drill
from umbel.errors import ConfigError
from umbel.faults import SERVER, VARIABLE, FaultPlan, InjectedFault

pytestmark = pytest.mark.fault


def test_a_plan_fires_once_and_knows_what_is_left(tmp_path) -> None:
    plan = FaultPlan(tmp_path / "log").at("b", round=2, point="after_train", do="raise")
    plan.at("b", round=2, point="after_train", do="nan")
    assert plan.fire("b", 1, "after_train") == ""
    assert plan.fire("c", 2, "after_train") == ""
    with pytest.raises(InjectedFault, match="after_train of round 2"):
        plan.fire("b", 2, "after_train")
    # Another life of the process reads the same log.
    again = FaultPlan.from_env({VARIABLE: plan.to_json()})
    assert [f.do for f in again.unfired()] == ["nan"]
    assert again.fire("b", 2, "after_train") == "nan"
    assert again.fire("b", 2, "after_train") == ""
    assert again.unfired() == []
    assert [row["fault"]["do"] for row in again.fired()] == ["raise", "nan"]


@pytest.mark.parametrize(("do", "code"), [("kill", -signal.SIGKILL), ("exit", 9)])
def test_kill_and_exit_end_the_process_after_the_log_is_written(tmp_path, do, code) -> None:
    plan = FaultPlan(tmp_path / "log").at(SERVER, round=1, point="dispatch", do=do)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from umbel.faults import *\nFaultPlan.from_env().fire('server', 1, 'dispatch')",
        ],
        env={**os.environ, VARIABLE: str(file)},
        check=False,
    )
    assert done.returncode == code
    assert plan.unfired() == []


def test_delay_and_hang(tmp_path) -> None:
    plan = FaultPlan(tmp_path / "log").at("a", round=1, point="before_send", do="delay", seconds=0.2)
    began = time.monotonic()
    plan.fire("a", 1, "before_send")
    assert time.monotonic() - began >= 0.2
    hang = FaultPlan(tmp_path / "hang").at("a", round=1, point="before_train", do="hang")
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from umbel.faults import *\nFaultPlan.from_env().fire('a', 1, 'before_train')",
        ],
        env={**os.environ, VARIABLE: hang.to_json()},
    )
    deadline = time.monotonic() + 20
    while hang.unfired() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert hang.unfired() == []
    assert child.poll() is None
    child.kill()
    child.wait()


def test_an_empty_environment_plans_nothing_and_a_wrong_one_is_refused() -> None:
    assert FaultPlan.from_env({}).faults == []
    assert FaultPlan.from_env({}).fire("a", 1, "before_train") == ""
    with pytest.raises(ConfigError, match=r"UMBEL_FAULTS\.point is unknown, got 'dispatch'"):
        FaultPlan().at("a", round=1, point="dispatch", do="kill")
    with pytest.raises(ConfigError, match=r"UMBEL_FAULTS\.do"):
        FaultPlan().at(SERVER, round=1, point="dispatch", do="explode")
    with pytest.raises(ConfigError, match="is not a fault plan"):
        FaultPlan.from_env({VARIABLE: "{}"})


def test_the_drill_of_a_site_strikes_between_steps_and_spoils_one_number(tmp_path) -> None:
    plan = FaultPlan(tmp_path / "log").at("a", round=3, point="mid_train", do="raise")
    plan.at("a", round=3, point="after_train", do="nan")
    clock = Clock(100.0)
    Drill(plan, "a", 2).between_steps(clock)
    clock.note(1, 10)
    drill = Drill(plan, "a", 3)
    drill.between_steps(clock)
    with pytest.raises(InjectedFault):
        clock.note(1, 10)
    arrays = {"w": np.ones((2, 2), np.float32), "b": np.ones(1, np.float32)}
    spoilt = drill.spoil(arrays)
    assert np.isnan(spoilt["w"]).sum() == 1
    assert not np.isnan(arrays["w"]).any()
    assert plan.unfired() == []


def test_faults_on_the_way_strike_after_the_answer_has_left(tmp_path) -> None:
    plan = FaultPlan(tmp_path / "log").at("a", round=1, point="mid_upload", do="delay")
    Drill(plan, "a", 1).on_the_way()
    deadline = time.monotonic() + 10
    while plan.unfired() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert plan.unfired() == []
