"""T16: a run that is killed and resumed at every phase of a method ends in the same bits as one that was not."""

from __future__ import annotations

import pytest
from support.inprocess import commits, make_session
from support.rules import SETTINGS, SITES

# Four engine rounds: RoLoRA is cut in either phase, FedASK between its stages, Fed-SB after its gradient.
METHODS = {
    "rolora": ("train.optimizer-state=keep",),
    "carry": ("lora.site-ranks=clinic=2",),
    "flora": (),
    "fedsa": (),
    "fedask": (),
    "fedsb": (),
    "fedplora": (),
    "fedit": ("server.optimizer=fedadam", "server.learning-rate=0.01"),
    "ffa": ("server.optimizer=nesterov", "server.learning-rate=0.7"),
}


class Killed(Exception):
    """Stands for the end of the server process."""


def run(folder, method: str, *overrides: str, die_after: int = 0) -> list[dict]:
    def fault(point: str, round_index: int) -> None:
        if die_after and point == "after_checkpoint" and round_index == die_after:
            raise Killed

    session = make_session(
        folder, *SETTINGS, f"run.method={method}", "run.rounds=4", *overrides, sites=SITES, fault=fault
    )
    code = session.run()
    assert code == (1 if die_after else 0), (folder / "run" / "server.log").read_text()[-2000:]
    return commits(folder)


@pytest.mark.parametrize("method", METHODS)
def test_t16_kill_and_resume_gives_the_same_bits(tmp_path, method: str) -> None:
    whole = run(tmp_path / "whole", method, *METHODS[method])
    folder = tmp_path / "cut"
    run(folder, method, *METHODS[method], die_after=1)
    run(folder, method, *METHODS[method], "run.resume=auto", die_after=2)
    run(folder, method, *METHODS[method], "run.resume=auto", die_after=3)
    resumed = run(folder, method, *METHODS[method], "run.resume=auto")
    assert [r["state_crc"] for r in resumed] == [r["state_crc"] for r in whole]
    assert len({r["state_crc"] for r in whole}) == 4


def test_fedask_refuses_a_site_that_was_not_in_the_first_stage(tmp_path) -> None:
    """What it would send cannot be added; the mean is that of the others."""
    import numpy as np

    from umbel.messages import CONTROL_RECORD, Instruction, from_record

    def absent_in_one(name, answer):
        def handle(kind, message):
            order = from_record(Instruction, message.content[CONTROL_RECORD])
            silent = name == "kitchen" and kind == "train" and order.round == 1
            return None if silent else answer(kind, message)

        return handle

    few = ("clients.quorum=1", "clients.grace-seconds=5", "run.method=fedask")
    session = make_session(tmp_path, *SETTINGS, *few, sites=SITES, wrap=absent_in_one)
    assert session.run() == 0
    records = commits(tmp_path)
    assert [[a["site"] for a in r["accepted"]] for r in records] == [["clinic"], ["clinic"]]
    assert [(r["site"], "first stage" in r["reason"]) for r in records[1]["rejected"]] == [("kitchen", True)]
    assert all(np.isfinite(a).all() for a in session.engine.state.values())
