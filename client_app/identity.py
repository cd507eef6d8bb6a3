"""Who this site is and where its rows are.

A real site says it itself, in the node config its operator starts `flower-supernode` with:

    --node-config 'name="st-mary" data="/data/notes.jsonl" state-dir="/var/lib/umbel"'

A simulated site has only `partition-id` and `num-partitions`; it takes its share of `data.source`. A real site
never opens a path that the run's configuration names: what may be read on an institution's disk is the
institution's decision. Only `demo:` and `hub:` sources, which are public, may come from the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.config import Config
from umbel.data.shares import PUBLIC_SOURCES, assign
from umbel.errors import Refusal, RefusalKind


@dataclass(frozen=True)
class Identity:
    """A site's stable name, its data source and the share of it, and its folder for durable state.

    `share` is (index, count): this site takes part `index` of `count` of the source; (0, 1) is all of it.
    """

    name: str
    source: str
    share: tuple[int, int]
    scheme: str
    state_dir: Path
    # The adapter's rank this site asks for in its node config; 0: whatever the run says.
    rank: int = 0


def default_state_dir() -> Path:
    """Return $UMBEL_STATE or ~/.umbel/state."""
    return Path(os.environ.get("UMBEL_STATE") or Path.home() / ".umbel" / "state")


def identify(node_config: Mapping[str, Any], node_id: int, config: Config) -> Identity:
    """Return the identity of this site; raises Refusal when it has no data of its own and may not borrow any."""
    state_dir = Path(str(node_config.get("state-dir") or default_state_dir())).expanduser()
    name = str(node_config.get("name") or "").strip()
    own = str(node_config.get("data") or "").strip()
    if own:
        return Identity(name or f"node-{node_id}", own, (0, 1), "iid", state_dir)
    if "partition-id" in node_config:
        index, count = int(node_config["partition-id"]), int(node_config.get("num-partitions", 1))
        default_name, source, share, scheme = assign(config.data.source, config.data.partition, index, count)
        return Identity(name or default_name, source, share, scheme, state_dir)
    if config.data.source.startswith(PUBLIC_SOURCES):
        if config.data.source == "demo:":
            from umbel.data.sources import demo_sites

            if name not in demo_sites():
                raise Refusal(
                    RefusalKind.NO_DATA,
                    f"this site is called {name or 'nothing'!r} and its node config has no data. "
                    'Start flower-supernode with --node-config \'name="..." data="/path/rows.jsonl"\'',
                )
            return Identity(name, f"demo:{name}", (0, 1), "iid", state_dir)
        return Identity(name or f"node-{node_id}", config.data.source, (0, 1), "iid", state_dir)
    raise Refusal(
        RefusalKind.NO_DATA,
        "the node config of this site has no data, and a path named by the run is never opened at a site. "
        "Start flower-supernode with --node-config 'data=\"/path/rows.jsonl\"'",
    )
