"""Checkpoints: whole or absent, verified, set aside loudly when damaged; a full disk does not end a run."""

from __future__ import annotations

import errno
import shutil

import ml_dtypes
import numpy as np
import pytest

from server_app import checkpoint
from umbel.checkpoints import CheckpointError, Memory, load_newest, read
from umbel.digest import state_crc

pytestmark = pytest.mark.fault


def memory(round_index: int) -> Memory:
    state = {
        "w": np.full((2, 3), round_index, np.float32),
        "h": np.arange(5).astype(ml_dtypes.bfloat16),
        "n": np.array(round_index),
        "empty": np.zeros((0, 4), np.float32),
    }
    return Memory(round_index, 1, state, {"m": np.ones(2)}, {"sites": {"a": {"settled": [round_index, 1]}}})


def filled(root, rounds=(1, 2, 3)):
    for r in rounds:
        checkpoint.save(root, memory(r), keep=10)
    return root


def test_round_trip_keeps_every_bit_and_shape(tmp_path) -> None:
    checkpoint.save(tmp_path, memory(4), keep=3)
    back = load_newest(tmp_path)
    assert back is not None
    assert state_crc(back.state) == state_crc(memory(4).state)
    assert back.state["n"].shape == ()
    assert back.meta["sites"]["a"]["settled"] == [4, 1]
    assert back.strategy["m"].tolist() == [1.0, 1.0]


def test_old_ones_are_removed(tmp_path) -> None:
    for r in range(1, 6):
        checkpoint.save(tmp_path, memory(r), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-000004", "round-000005"]


@pytest.mark.parametrize("name", ["state.safetensors", "strategy.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_f11_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(
    tmp_path, name, damage, caplog
) -> None:
    """F11: truncated, bit-flipped or missing parts."""
    filled(tmp_path)
    path = tmp_path / "round-000003" / name
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    back = load_newest(tmp_path)
    assert back is not None
    assert back.round == 2
    assert (tmp_path / "round-000003.corrupt").is_dir()
    assert "round-000003.corrupt" in caplog.text
    # The round that is run again must find its place free.
    checkpoint.save(tmp_path, memory(3), keep=10)
    assert read(tmp_path / "round-000003").round == 3


def test_f11_a_stray_temporary_is_never_read(tmp_path) -> None:
    filled(tmp_path, (1,))
    shutil.copytree(tmp_path / "round-000001", tmp_path / ".round-000009.123")
    back = load_newest(tmp_path)
    assert back is not None
    assert back.round == 1


def test_all_damaged_is_an_error_and_never_a_fresh_start(tmp_path) -> None:
    filled(tmp_path, (1, 2))
    for folder in list(tmp_path.glob("round-*")):
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="all 2 checkpoints"):
        load_newest(tmp_path)
    with pytest.raises(CheckpointError):
        load_newest(tmp_path)


def test_no_checkpoint_is_none(tmp_path) -> None:
    assert load_newest(tmp_path / "absent") is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_f12_a_disk_that_refuses_keeps_the_old_one(tmp_path, monkeypatch, caplog, code) -> None:
    """F12: warn and go on; after three in a row, stop. Nothing torn is left."""
    writer = checkpoint.Writer(tmp_path, keep=3)
    assert writer.save(memory(1))

    def refuse(path, data):
        raise OSError(code, "no")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_durable", refuse)
        assert writer.save(memory(2)) is None
        assert writer.save(memory(3)) is None
        assert [p.name for p in tmp_path.iterdir()] == ["round-000001"]
        with pytest.raises(CheckpointError, match="3 checkpoints in a row"):
            writer.save(memory(4))
    assert "not written" in caplog.text
    back = load_newest(tmp_path)
    assert back is not None
    assert back.round == 1


def test_f13_changes_of_the_trajectory_are_listed() -> None:
    """F13: learning rate and model are named; the number of rounds may change."""
    from umbel.config import resolve, to_flat

    old = to_flat(resolve(None, []))
    new = to_flat(
        resolve(
            None, ["train.learning-rate=0.5", "run.rounds=99", "run.seed=3", "clients.deadline-seconds=900"]
        )
    )
    assert checkpoint.trajectory_changes(old, new) == [
        "run.seed: 42 -> 3",
        "train.learning-rate: 0.0003 -> 0.5",
    ]
