"""The ledger's size of a message against Flower's own serialisation of the whole of it."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import metadata_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from compression.flower import frame_to_array
from server_app.traffic import DOWN, UP, Traffic, message_bytes
from umbel.telemetry.history import History


def message(size: int, kind: str = "train", node: int = 7) -> Message:
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    frame = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    records = {
        "frame": ArrayRecord({"frame": frame_to_array(frame)}),
        "control": ConfigRecord({"config": "x" * 3000, "round": 3}),
    }
    return Message(RecordDict(records), node, kind)


@pytest.mark.parametrize("size", [1, 50_000, 5 * 2**20, 13_000_000])
def test_a_message_is_as_long_as_flower_makes_it(size: int) -> None:
    """Objects as they are pushed and pulled, their tree and the metadata; to 40 bytes, over several chunks too."""
    made = message(size)
    found = sum(len(part.deflate()) for part in get_all_nested_objects(made).values())
    found += get_object_tree(made).ByteSize() + metadata_to_proto(made.metadata).ByteSize()
    assert message_bytes(made)[0] == pytest.approx(found, abs=40)


def test_counting_leaves_the_message_as_it_was() -> None:
    made = message(1000)
    before = made.content["frame"]["frame"].data
    message_bytes(made)
    assert made.content["frame"]["frame"].data == before
    assert len(before) == 1000


def test_rows_are_by_site_phase_and_direction_and_taken_once() -> None:
    traffic = Traffic()
    for kind in ("query.join", "train", "train", "evaluate"):
        traffic.count(7, DOWN, message(2000, kind))
    traffic.count(9, UP, message(5000, node=9))
    rows = traffic.take({7: "clinic"})
    seen = {(r["site"], r["phase"], r["direction"]): (r["messages"], r["bytes"]) for r in rows}
    one, (five, asked) = message_bytes(message(2000))[0], message_bytes(message(5000, node=9))
    assert seen["clinic", "train", "down"] == (2, 2 * one)
    assert seen["clinic", "join", "down"][0] == seen["clinic", "evaluate", "down"][0] == 1
    assert seen["node 9", "train", "up"] == (1, five)
    # Whoever sends a reply is told which of its objects are wanted.
    assert seen["node 9", "train", "down"] == (0, asked)
    assert traffic.take({}) == []


def test_a_history_adds_the_rows_of_all_events() -> None:
    row = {"site": "clinic", "phase": "train", "direction": "up", "messages": 1, "bytes": 100}
    events = [{"event": "traffic", "rows": [row, {**row, "direction": "down", "bytes": 7}]}] * 2
    history = History.from_events([*events, {"event": "traffic", "rows": "broken"}])
    assert history.traffic() == {"clinic": {"train": {"up": 200, "down": 14}}}
    assert (history.wire_bytes("up"), history.wire_bytes("down")) == (200, 14)
