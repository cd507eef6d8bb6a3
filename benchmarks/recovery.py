"""kill -9 of the server at six points of a round, then resume: are all states the same, and how soon does it go on?

    python -m benchmarks.recovery --json            one process per life of the server, as in earnest
    python -m benchmarks.recovery --json --fork     the processes are forks of one that has loaded the libraries

A run of four rounds over three sites (the project's own ClientApp on the built-in model, in process, durable state
on disk) is done once undisturbed. Then, for each point, a run is killed there in round 2 by a fault plan and started
again with run.resume=auto. `state_hash_equal`: every round's `state_crc` equals that of the undisturbed run, every
planned fault fired, and the offline checker finds nothing. `seconds_to_dispatch`: from the start of the new process
to the first messages of the round it goes on with; with --fork it lacks the loading of the libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

KILL_ROUND = 2


def live(folder: Path, *overrides: str) -> int:
    """Be the server for one life; notes the time of the first dispatch in `folder/dispatch`."""
    from support.inprocess import make_session

    from umbel.faults import SERVER, FaultPlan

    plan = FaultPlan.from_env()

    def fault(point: str, round_index: int) -> None:
        if point == "dispatch" and not (folder / "dispatch").exists():
            (folder / "dispatch").write_text(str(time.time()))
        plan.fire(SERVER, round_index, point)

    return make_session(folder, "telemetry.keep-updates=true", *overrides, fault=fault).run()


def start(folder: Path, plan: str, overrides: list[str], *, fork: bool) -> tuple[int, float]:
    """Run one life in a process of its own; returns (exit code, negative for a signal; seconds to dispatch)."""
    (folder / "dispatch").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "UMBEL_FAULTS": plan, "HF_HUB_OFFLINE": "1"}
    began = time.time()
    with open(folder / "log", "ab") as log:
        if fork:
            code = forked(folder, plan, overrides, log.fileno())
        else:
            command = [sys.executable, "-m", "benchmarks.recovery", "--life", str(folder), *overrides]
            code = subprocess.run(command, env=env, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
    mark = folder / "dispatch"
    return code, float(mark.read_text()) - began if mark.exists() else float("nan")


def forked(folder: Path, plan: str, overrides: list[str], log: int) -> int:
    """As a child of this process, which has imported everything and computed nothing."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["UMBEL_FAULTS"] = plan
            code = live(folder, *overrides)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def measure(folder: Path, *, fork: bool, repeat: int = 1) -> dict[str, Any]:
    """Return the printed result."""
    from support.inprocess import crcs

    from server_app.checker import check_run
    from umbel.faults import SERVER, SERVER_POINTS, FaultPlan

    if fork:
        import peft  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    code, _ = start(folder / "reference", "", [], fork=fork)
    reference = crcs(folder / "reference")
    if code != 0:
        logs = (folder / "reference" / "log", folder / "reference" / "run" / "server.log")
        raise RuntimeError("".join(p.read_text()[-2000:] for p in logs if p.exists()))
    points = []
    for point in SERVER_POINTS:
        for turn in range(repeat):
            here = folder / f"{point}-{turn}"
            plan = FaultPlan(here / "fired.jsonl").at(SERVER, round=KILL_ROUND, point=point, do="kill")
            died, _ = start(here, plan.to_json(), [], fork=fork)
            code, seconds = start(here, plan.to_json(), ["run.resume=auto"], fork=fork)
            problems = check_run(here / "run")
            points.append(
                {
                    "point": point,
                    "killed": died == -signal.SIGKILL and not plan.unfired(),
                    "state_hash_equal": code == 0 and crcs(here) == reference,
                    "seconds_to_dispatch": round(seconds, 3),
                    "checker": problems,
                }
            )
    return {"reference": reference, "fork": fork, "points": points}


def main() -> int:
    """Print the result and return 1 when a state differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--fork", action="store_true", help="fork instead of starting processes")
    parser.add_argument("--repeat", type=int, default=1, help="kills at each point")
    parser.add_argument("--life", help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    if arguments.life:
        return live(Path(arguments.life), *overrides)
    with tempfile.TemporaryDirectory(prefix="umbel-recovery-") as scratch:
        result = measure(Path(scratch), fork=arguments.fork, repeat=arguments.repeat)
    good = all(p["killed"] and p["state_hash_equal"] and not p["checker"] for p in result["points"])
    if arguments.json:
        print(json.dumps(result))
    else:
        for p in result["points"]:
            print(
                f"{p['point']:<18} equal {p['state_hash_equal']}  dispatch after {p['seconds_to_dispatch']} s"
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
