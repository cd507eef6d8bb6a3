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


def test_fedask_without_one_site_in_its_second_stage_is_the_others_ideal(tmp_path, monkeypatch) -> None:
    """A site that joins only the second stage says so; one that left after the first is missing, and that is exact."""
    import numpy as np
    from support.rules import distance, effective, exported, run_method

    from umbel.messages import CONTROL_RECORD, Instruction, from_record

    done = run_method(monkeypatch, tmp_path, "fedask", "clients.quorum=1", "run.rounds=2")
    both = done.ideal(1)
    assert distance(effective(exported(done)[0]), both) < 0.5

    from support.fakegrid import app_site

    def absent_in_one(name, answer):
        def handle(kind, message):
            order = from_record(Instruction, message.content[CONTROL_RECORD])
            if name == "kitchen" and kind == "train" and order.round == 1:
                return None
            return answer(kind, message)

        return handle

    assert app_site
    session = make_session(
        tmp_path / "one",
        *SETTINGS,
        "run.method=fedask",
        "clients.quorum=1",
        "clients.grace-seconds=5",
        sites=SITES,
        wrap=absent_in_one,
    )
    assert session.run() == 0
    records = commits(tmp_path / "one")
    assert [[a["site"] for a in r["accepted"]] for r in records] == [["clinic"], ["clinic"]]
    assert [(r["site"], "first stage" in r["reason"]) for r in records[1]["rejected"]] == [("kitchen", True)]
    assert all(np.isfinite(a).all() for a in session.engine.state.values())
