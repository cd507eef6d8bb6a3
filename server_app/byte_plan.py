"""The plan of `umbel plan` with the frames' real sizes: the layouts, codecs and headers that a run will use.

    python -m server_app.byte_plan < configurations.json       one flat configuration, or a list of them

Sizes of codecs with a fixed rate are exact to the byte; for the others (`exact_bytes` false) they are those of noise
in the same shapes (`compression.prediction`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from compression import Layout
from compression.payload import delta_layout, is_exact
from compression.prediction import Predicted, expected_bytes
from compression.roles import role_for
from server_app.downlink import NOTHING
from umbel.cli.plan import Plan, cohort
from umbel.config import Config, from_json
from umbel.digest import state_crc
from umbel.exchange import Exchange, Form
from umbel.models.described import described
from umbel.seeds import derive_seed

# Only its length counts in a header.
SOME_STATE = state_crc({})
SOME_MODEL = "0" * 64


class BytePlan(Plan):
    """A plan whose frames are those of the configured codecs; `exact` tells whether every size is certain."""

    def __init__(self, config: Config, sites: Sequence[str]) -> None:
        super().__init__(config, sites)
        self.exact = True
        self._layouts: dict[Form, Layout] = {}

    def layout(self, form: Form, whole: bool) -> Layout:
        """Return the layout of one direction; `whole` is a state that no form describes."""
        key = Form() if whole else form
        if key not in self._layouts:
            tensors = self.state if whole else form.tensors(self.modules, self.dtype)
            self._layouts[key] = Layout.from_arrays(tensors, role_for)
        return self._layouts[key]

    def sizes(self, exchange: Exchange, round_index: int, site: str) -> tuple[int, int]:
        """Return (up, down) of one site and round as `server_app.dispatch` and the site make the frames."""
        c, seed = self.config.compression, self.config.run.seed
        plain = not self.modules or exchange == Exchange()
        up, down = (self.layout(form, plain) for form in (exchange.up, exchange.down))
        own = derive_seed(derive_seed(seed, "codec", round_index), site)
        wide = up if is_exact(c.up) else delta_layout(up)
        sent = expected_bytes(wide, c.up, seed=own, round_index=round_index, base=SOME_STATE)
        got = self._down(down, round_index)
        self.exact = self.exact and sent.exact and got.exact
        return sent.num_bytes, got.num_bytes

    def _down(self, layout: Layout, round_index: int) -> Predicted:
        """Return the bytes down to a site in step; a lossy way down begins with what the site lacks of the start."""
        down, seed = self.config.compression.down, self.config.run.seed
        if is_exact(down):
            return expected_bytes(layout, down, round_index=round_index, base=SOME_STATE)
        if round_index > 1:
            # Made with the commit before, against a model named by its SHA-256.
            made = {"seed": derive_seed(seed, "down", round_index - 1), "round_index": round_index - 1}
            return expected_bytes(layout, down, base=SOME_MODEL, **made)
        if self.config.train.mode == "full" and described(self.config)[0].has_weights:
            return Predicted(len(NOTHING), True)
        return expected_bytes(layout, "lossless", base=SOME_MODEL)

    def report(self) -> dict[str, Any]:
        """Return the plan as plain data, `exact_bytes` included."""
        found = super().report()
        return {**found, "exact_bytes": self.exact}


def byte_plan(config: Config, sites: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the plan of a configuration; loads no weights. Raises ConfigError for a codec that is none."""
    return BytePlan(config, sites or cohort(config)).report()


def main() -> None:
    """Read configurations from the standard input and print their plans as one JSON value."""
    asked = json.load(sys.stdin)
    made = [byte_plan(from_json(json.dumps(one))) for one in (asked if isinstance(asked, list) else [asked])]
    print(json.dumps(made, default=lambda v: v.item() if isinstance(v, np.generic) else str(v)))


if __name__ == "__main__":
    main()
