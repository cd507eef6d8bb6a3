"""What a receiver is willing to look at, whatever a frame says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Upper bounds checked before anything is allocated. Sizes in bytes, `max_numel` in elements."""

    max_frame_bytes: int = 1 << 36
    max_header_bytes: int = 1 << 16
    max_numel: int = 1 << 36


DEFAULT_LIMITS = Limits()
