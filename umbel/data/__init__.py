"""Data of a site: reading, formats, encoding, split, order, packing. Knows neither Flower nor a model.

rows = load_rows("demo:clinic")
train, heldout = heldout_split(rows, 0.1)
encoded = encode_rows([rows[i] for i in train], detect_format(rows), tokenizer, max_length=512)
indices, cursor = take(Cursor(), len(encoded), 8, seed=0, site="clinic")
packed = pack_rows([encoded.rows[i] for i in indices], 2048)
"""

from umbel.data.cursor import Cursor, take
from umbel.data.digest import dataset_digest
from umbel.data.encode import IGNORE, EncodeCounts, Encoded, EncodedSet, encode_rows
from umbel.data.formats import Message, Messages, RowFormat, detect_format, to_messages
from umbel.data.packing import PackedRow, PaddedBatch, pack_rows, pad_rows, supervised_positions
from umbel.data.partition import files_of, partition
from umbel.data.sources import demo_sites, load_rows
from umbel.data.split import heldout_split
from umbel.data.template import PLAIN_TEMPLATE, ChatFormat, fold_system, resolve_format

__all__ = [
    "IGNORE",
    "PLAIN_TEMPLATE",
    "ChatFormat",
    "Cursor",
    "EncodeCounts",
    "Encoded",
    "EncodedSet",
    "Message",
    "Messages",
    "PackedRow",
    "PaddedBatch",
    "RowFormat",
    "dataset_digest",
    "demo_sites",
    "detect_format",
    "encode_rows",
    "files_of",
    "fold_system",
    "heldout_split",
    "load_rows",
    "pack_rows",
    "pad_rows",
    "partition",
    "resolve_format",
    "supervised_positions",
    "take",
    "to_messages",
]
