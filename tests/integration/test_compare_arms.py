"""`umbel compare` with its two baselines, over the real server and sites in one process."""

from __future__ import annotations

import json

import pytest
from support.fakegrid import FakeGrid, FakeSite, VirtualClock, app_site
from support.inprocess import SETTINGS as BASE
from support.rules import SETTINGS

from server_app.run import Session
from umbel.cli.compare import compare, configurations
from umbel.data.sources import load_rows
from umbel.data.split import heldout_split

OVERRIDES = (*BASE, *SETTINGS, "run.rounds=2", "simulation.sites=2", "data.limit=24", "data.max-length=96")


def simulate(folder):
    """Return what runs a configuration as a simulation does: sites that take their share of `data.source`."""

    def run(config) -> int:
        clock = VirtualClock()
        grid = FakeGrid(clock)
        for i in range(config.simulation.sites):
            node = {
                "partition-id": i,
                "num-partitions": config.simulation.sites,
                "state-dir": str(folder / config.run.name),
                "resident": "off",
            }
            grid.sites[i + 1] = FakeSite(app_site(i + 1, node))
        return Session(config, grid, simulated=True, now=clock.now, sleep=clock.sleep).run()

    return run


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arms")
    planned = configurations(None, OVERRIDES, ["fedit", "local", "centralised"], 1, folder / "out")
    assert compare(planned, simulate(folder), folder / "out", say=lambda text: None) == 0
    rows = json.loads((folder / "out" / "comparison.json").read_text())
    return folder / "out", planned, {row["method"]: row for row in rows}


def test_all_arms_take_the_same_number_of_tokens_and_start_from_the_same_loss(compared) -> None:
    """The base is the base, whoever holds the rows; the pooled arm takes the steps of all sites."""
    _, planned, rows = compared
    assert [m for m, _, _ in planned] == ["fedit", "local", "local", "centralised"]
    tokens = [rows[m]["tokens"] for m in ("fedit", "local", "centralised")]
    assert tokens[0] == tokens[1] > 0
    assert tokens[2] == pytest.approx(tokens[0], rel=0.3)
    first = [rows[m]["heldout_loss_first"] for m in ("fedit", "local", "centralised")]
    assert first[1] == pytest.approx(first[0], abs=1e-5)
    assert first[2] == pytest.approx(first[0], abs=1e-5)
    assert all(rows[m]["heldout_loss_last"] < first[0] for m in rows)


def test_no_row_that_is_held_out_is_trained_on(compared) -> None:
    folder, _, _ = compared
    data = folder / "rows" / "seed-7"
    names = ("clinic", "kitchen")
    pool, heldout = load_rows(str(data / "pool")), load_rows(str(data / "heldout.jsonl"))
    assert pool == [row for name in names for row in load_rows(str(data / name))]
    assert not [row for row in heldout if row in pool]
    for name in names:
        rows = load_rows(f"demo:{name}")[:24]
        train, held = heldout_split(rows, 0.1, max_heldout=64)
        assert load_rows(str(data / name)) == [rows[i] for i in train]
        assert all(rows[i] in heldout for i in held)


def test_the_table_shows_no_bytes_for_an_arm_that_exchanges_nothing(compared) -> None:
    folder, _, _ = compared
    lines = (folder / "comparison.md").read_text().splitlines()
    cells = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")] for line in lines[2:]}
    assert set(cells) == {"fedit", "local", "centralised"}
    assert cells["local"][6] == cells["local"][7] == "-"
    assert cells["fedit"][6] != "-"
