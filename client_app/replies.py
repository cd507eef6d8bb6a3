"""Replies and refusals: what a site answers, whatever went wrong.

Only our own messages are quoted to the server. A library's message may hold a row of data, so of any other error
only the type and the place leave the site; the traceback stays in its log.
"""

from __future__ import annotations

from typing import Any

import compression
from umbel.errors import ConfigError, DataError, ModelError, Refusal, RefusalKind, UmbelError
from umbel.messages import Instruction, Reply


def blank_reply(instruction: Instruction, site: str, **fields: Any) -> Reply:
    """Return a reply that echoes the identity of the work."""
    return Reply(
        run=instruction.run,
        round=instruction.round,
        attempt=instruction.attempt,
        base=instruction.base,
        site=site,
        **fields,
    )


def as_refusal(error: Exception) -> Refusal:
    """Return the typed refusal for any error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, compression.NonFiniteError):
        return Refusal(RefusalKind.NON_FINITE, str(error))
    if isinstance(error, DataError):
        return Refusal(RefusalKind.NO_DATA, str(error))
    if isinstance(error, (ConfigError, ModelError, UmbelError)):
        return Refusal(RefusalKind.REFUSED, str(error))
    if is_out_of_memory(error):
        return Refusal(
            RefusalKind.OOM, "out of memory; lower train.max-tokens, train.batch-size or data.max-length"
        )
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" at {place.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{place.tb_lineno}" if place else ""
    return Refusal(RefusalKind.EXCEPTION, f"{type(error).__name__}{where}; the site's log has the traceback")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and (
        "not enough memory" in str(error) or "out of memory" in str(error)
    )
