"""What travels between the server and a site: names, versions and two record types.

A message holds at most one frame (bytes in a uint8 `Array` of our own serialisation type, see
`compression.flower`) and one ConfigRecord of scalars and short strings. Structured control data is canonical
JSON in one string; nothing is ever unpickled. Parsing is strict: a field that is missing, unknown or of the wrong
type raises `MessageError`, which the server counts against that one site.

    query.join   server -> site   who are you, what do you have          -> Reply, metrics carry the join facts
    train        server -> site   Instruction + state frame              -> Reply + update frame
    evaluate     server -> site   Instruction + state frame              -> Reply, metrics carry loss sums
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from flwr.app import ConfigRecord, RecordDict

PROTOCOL_VERSION = 1

# Message types (Flower's message_type) and record keys.
JOIN = "query.join"
TRAIN = "train"
EVALUATE = "evaluate"
# Answered at once, with nothing (`server_app.follow_up` says what for).
FOLLOW_UP = "query.follow_up"
CONTROL_RECORD = "umbel"
FRAME_RECORD = "frame"

# Longest JSON string accepted in a control field: refuses a reply built to exhaust memory.
MAX_TEXT_CHARS = 4_000_000

STATUS_OK = "ok"


class MessageError(ValueError):
    """A record does not have the fields of its type."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One order to one site. `base` names the exact bits of the state in the frame (`umbel.digest.state_crc`)."""

    run: str
    round: int
    attempt: int
    base: str
    site: str
    remaining_seconds: float
    up: str = "exact"
    payload: str = "value"
    evaluate: bool = False
    config: str = "{}"
    directives: str = "{}"
    settled: str = "[0, 0]"
    outcomes: str = "[]"
    layout: str = ""
    protocol: int = PROTOCOL_VERSION


@dataclasses.dataclass(frozen=True)
class Reply:
    """A site's answer. `status` is 'ok' or a `RefusalKind`; `weight` is what the merge uses, `tokens` what was
    trained; `metrics` is JSON with seconds, memory and held-out sums."""

    run: str
    round: int
    attempt: int
    base: str
    site: str
    status: str = STATUS_OK
    reason: str = ""
    weight: float = 0.0
    tokens: int = 0
    steps: int = 0
    loss: float = 0.0
    partial: bool = False
    payload: str = "value"
    metrics: str = "{}"
    protocol: int = PROTOCOL_VERSION


_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


def to_record(item: Instruction | Reply) -> ConfigRecord:
    """Return the ConfigRecord that carries `item`."""
    return ConfigRecord(dataclasses.asdict(item))


def from_record(kind: type, record: Any) -> Any:
    """Parse a ConfigRecord into `kind` (Instruction or Reply); raises MessageError naming the field."""
    fields = {f.name: _KINDS[str(f.type)] for f in dataclasses.fields(kind)}
    values = dict(record)
    unknown = sorted(set(values) - set(fields))
    missing = sorted(set(fields) - set(values))
    if unknown or missing:
        raise MessageError(f"{kind.__name__} has unknown fields {unknown[:3]} and lacks {missing[:3]}")
    for name, expected in fields.items():
        value: Any = values[name]
        # bool is an int to Python and never a number to us.
        if type(value) is not expected:
            raise MessageError(
                f"{kind.__name__}.{name} must be {expected.__name__}, got {type(value).__name__}"
            )
        if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
            raise MessageError(
                f"{kind.__name__}.{name} has {len(value)} characters, more than {MAX_TEXT_CHARS}"
            )
    if values["protocol"] != PROTOCOL_VERSION:
        raise MessageError(
            f"protocol version {values['protocol']} differs from {PROTOCOL_VERSION}: "
            "server and site run different versions of umbel"
        )
    return kind(**values)


def control_of(content: RecordDict) -> Any:
    """Return the control record of a message's content, or raise MessageError."""
    if CONTROL_RECORD not in content or not isinstance(content[CONTROL_RECORD], ConfigRecord):
        raise MessageError(f"the message has no {CONTROL_RECORD!r} record")
    return content[CONTROL_RECORD]


def parse_json(text: str, what: str) -> Any:
    """Parse a JSON field; raises MessageError instead of the parser's error."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MessageError(f"{what} is not JSON: {error}") from None


def plain_metrics(values: dict[str, Any]) -> str:
    """Return metrics as JSON: numbers of any library become int or float, what is no number is left out.

    A trained update must never be lost because of a metric's type.
    """
    return json.dumps(_plain(values), sort_keys=True, separators=(",", ":"), allow_nan=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        cleaned = {str(k): _plain(v) for k, v in value.items()}
        return {k: v for k, v in cleaned.items() if v is not None}
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [v for v in (_plain(x) for x in value) if v is not None]
    item = getattr(value, "item", None)
    if (callable(item) and getattr(value, "size", None) in (1, None)) or hasattr(value, "numel"):
        try:
            return item()  # type: ignore[misc]
        except (ValueError, RuntimeError, TypeError):
            return None
    return None
