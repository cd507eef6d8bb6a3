"""H34: how many virtual sites fit is known before the start, and what can never fit is an error, not a wait."""

from __future__ import annotations

import pytest

from umbel.cli.launch import check_room
from umbel.config.schema import Simulation
from umbel.errors import ConfigError


def never() -> int:
    raise AssertionError("GPUs are not looked for unless they are asked for")


def test_h34_sites_at_a_time_by_cores_gpus_and_sites() -> None:
    assert check_room(Simulation(sites=10, cpus_per_site=2), 8, never) == 4
    assert check_room(Simulation(sites=3, cpus_per_site=1), 8, never) == 3
    assert check_room(Simulation(sites=40, cpus_per_site=1, gpus_per_site=0.25), 16, lambda: 2) == 8


def test_h34_what_never_fits_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"cpus-per-site.*got 3.*1\.\.2"):
        check_room(Simulation(cpus_per_site=3), 2, never)
    with pytest.raises(ConfigError, match=r"gpus-per-site.*0 GPUs"):
        check_room(Simulation(gpus_per_site=0.5), 2, lambda: 0)
