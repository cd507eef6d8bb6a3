"""The two errors of the codec: one for what a sender may not send, one for what a receiver will not
accept."""

from __future__ import annotations

from umbel.errors import UmbelError


class EncodeError(UmbelError, ValueError):
    """A tensor cannot be encoded as asked; `.tensor` names it (empty when no single tensor is at fault)."""

    def __init__(self, tensor: str, problem: str) -> None:
        self.tensor = tensor
        super().__init__(f"tensor {tensor!r} {problem}" if tensor else problem)


class NonFiniteError(EncodeError):
    """A value to be sent is NaN or infinite (hazards H18, H24): refused before any stage sees it."""


class FrameError(ValueError):
    """Received bytes are not a frame this receiver accepts. `.code` is a short stable word for counters and
    logs."""

    def __init__(self, code: str, detail: str = "") -> None:
        self.code = code
        super().__init__(f"{code}: {detail}" if detail else code)
