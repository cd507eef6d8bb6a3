"""The ledger of bytes on the wire: per site, phase and direction, as Flower moves them.

    bytes of a message = its frame, in chunks of 5 MiB + everything around it (records, names, object ids)

What is around a frame is measured on a copy of the message with an empty frame, by Flower's own serialisation, so that
no large array is copied or hashed for it. Phases are the kinds of message (join, train, evaluate); down is server to
site. Flower counts the same bytes per run (`flwr ls`, network traffic): between SuperLink and SuperNodes, requests and
answers. Retries of the transport and the app bundle are in neither.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.common.serde import metadata_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

UP, DOWN = "up", "down"
# "ArrayChunk", the length, separators; the chunk's id in its parent and in the tree.
CHUNK_BYTES = 22 + 65 + 68
# An id in the list of objects that the receiver of a reply asks for, and what surrounds the list.
ASKED_BYTES, ANSWER_BYTES = 66, 80
FRAMING_BYTES = 12


class Traffic:
    """Counts messages by (node, phase, direction); safe to use from the threads that pull replies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, str, str], list[int]] = {}

    def count(self, node: int, direction: str, message: Message) -> None:
        """Add one message that was sent to, or came from, a node; an error reply without content counts nothing."""
        if not message.has_content():
            return
        there, back = message_bytes(message)
        phase = message.metadata.message_type.removeprefix("query.")
        opposite = DOWN if direction == UP else UP
        with self._lock:
            self._add(node, phase, direction, 1, there)
            if direction == UP:
                self._add(node, phase, opposite, 0, back)

    def _add(self, node: int, phase: str, direction: str, messages: int, num_bytes: int) -> None:
        row = self._rows.setdefault((node, phase, direction), [0, 0])
        row[0] += messages
        row[1] += num_bytes

    def take(self, names: Mapping[int, str]) -> list[dict[str, Any]]:
        """Return the rows since the last call and forget them; `names` gives the sites of nodes."""
        with self._lock:
            rows, self._rows = self._rows, {}
        return [
            {
                "site": names.get(node, f"node {node}"),
                "phase": phase,
                "direction": direction,
                "messages": messages,
                "bytes": num_bytes,
            }
            for (node, phase, direction), (messages, num_bytes) in sorted(rows.items())
        ]


def message_bytes(message: Message) -> tuple[int, int]:
    """Return (bytes of a message on the wire, bytes of the answer to its sender, which asks for its objects)."""
    bulk, records = 0, {}
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            sizes = [len(array.data) for array in record.values()]
            bulk += sum(s + CHUNK_BYTES * -(-s // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE) for s in sizes)
            records[name] = ArrayRecord({key: _emptied(array) for key, array in record.items()})
        else:
            records[name] = record
    shell = copy.copy(message)
    shell.content = RecordDict(records)
    objects = get_all_nested_objects(shell)
    around = sum(len(found.deflate()) for found in objects.values())
    around += get_object_tree(shell).ByteSize() + metadata_to_proto(shell.metadata).ByteSize() + FRAMING_BYTES
    chunks = bulk // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + 1 if bulk else 0
    return bulk + around, ANSWER_BYTES + ASKED_BYTES * (len(objects) + chunks)


def _emptied(array: Array) -> Array:
    return Array(dtype=array.dtype, shape=array.shape, stype=array.stype, data=b"")
