"""`umbel site` against the pinned Flower: what it needs is there, and what differs falls back to the stock SuperNode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from client_app.resident import site
from client_app.resident.site import NEEDED, Executor, Waits, problem, value_of


def test_r8_the_pinned_flower_has_all_that_is_needed() -> None:
    assert problem([]) == ""


@pytest.mark.parametrize(
    ("needed", "words"),
    [
        ({"flwr.supernode.start_client_internal": {"no_such_name": ()}}, "has no no_such_name"),
        ({"flwr.supernode.no_such_module": {"x": ()}}, "cannot be imported"),
        ({"flwr.supernode.runtime.run_clientapp": {"push_message": ("parcel",)}}, "no parameter 'parcel'"),
    ],
)
def test_r8_a_difference_is_named(needed, words) -> None:
    assert words in problem([], needed=needed)


@pytest.mark.parametrize("option", ["--ssl-certfile=x", "--superexec-auth-secret-file", "--isolation"])
def test_options_the_executor_does_not_serve_are_named(option) -> None:
    assert option.split("=")[0] in problem([option])


def test_r8_another_version_runs_the_stock_supernode_with_one_warning(tmp_path) -> None:
    """A program in place of flower-supernode shows what would have been run, and with which poll interval."""
    stand_in = tmp_path / "flower-supernode"
    stand_in.write_text('#!/bin/sh\necho "stock $FLWR_SUPEREXEC_TASK_POLL_INTERVAL $*"\n')
    stand_in.chmod(0o755)
    code = (
        "import sys; from client_app.resident import site; site.PINNED = '9.9.'; "
        f"sys.executable = {str(tmp_path / 'python')!r}; site.main(sys.argv[1:])"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_SUPEREXEC")}
    command = [sys.executable, "-c", code, "--insecure", "--superlink", "127.0.0.1:1"]
    root = str(Path(site.__file__).parents[2])
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip().splitlines()[-1] == "stock 0.05 --insecure --superlink 127.0.0.1:1"
    warnings = [line for line in done.stderr.splitlines() if "umbel site" in line]
    assert len(warnings) == 1
    assert "not 9.9." in warnings[0]


def test_the_waits_grow_with_idleness_and_stay_within_their_bounds() -> None:
    now, slept = [0.0], []
    waits = Waits(now=lambda: now[0], sleep=slept.append)
    for at in (0.0, 5.0, 50.0, 1e6):
        now[0] = at
        waits.sleep(3)
    waits.sleep(0.5)
    waits.sleep(3)
    waits.sleep(1.25)
    assert slept == [0.1, 0.1, 1.0, 3.0, 0.02, 0.1, 1.25]
    assert waits.monotonic() > 0


def test_bundles_that_a_site_does_not_allow_or_that_are_not_ours_are_refused(tmp_path) -> None:
    class Fab:
        hash_str = "abc123"
        content = b""

    executor = Executor("127.0.0.1:1")
    executor._installed["abc123"] = tmp_path
    with pytest.raises(PermissionError, match="allowed-bundles"):
        executor.bundle(Fab(), "ff00, ab99")
    with pytest.raises(LookupError, match="not one of Umbel"):
        executor.bundle(Fab(), "ff00, abc1")
    (tmp_path / "client_app/resident").mkdir(parents=True)
    (tmp_path / "client_app/resident/worker.py").touch()
    assert executor.bundle(Fab(), "") == tmp_path


def test_options_are_found_in_both_spellings() -> None:
    assert value_of(["--port", "9"], "--port") == value_of(["--port=9"], "--port") == "9"
    assert value_of(["--port"], "--port") == ""
    assert set(NEEDED) >= {"flwr.supernode.start_client_internal"}
