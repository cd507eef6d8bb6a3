"""Silence for library noise that says nothing about the run: progress bars, notes between libraries."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# PEFT sets the storage order of each layer by itself and warns about doing so; PEFT and Umbel use the names for
# gradient checkpointing that all supported versions of Transformers know.
_NOTES = ("fan_in_fan_out is set to", "`(is_)?gradient_checkpointing(_enable)?` is deprecated")


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Turn Transformers' progress bars off for the block and back to what they were after it."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def quiet_notes() -> Iterator[None]:
    """Drop the known, harmless warnings for the block; all others pass."""
    with warnings.catch_warnings():
        for note in _NOTES:
            warnings.filterwarnings("ignore", message=note)
        yield
