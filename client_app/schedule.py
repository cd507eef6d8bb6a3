"""Learning rate as a function of the global step: `umbel.local_step`, which the server's half of a cut model uses too."""

from __future__ import annotations

from umbel.local_step import learning_rate

__all__ = ["learning_rate"]
