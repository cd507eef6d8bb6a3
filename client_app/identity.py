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
from umbel.errors import Refusal, RefusalKind

PUBLIC_SOURCES = ("demo:", "hub:")


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


def assign(source: str, partition: str, index: int, count: int) -> tuple[str, str, tuple[int, int], str]:
    """Return (name, source, share, scheme) of simulated site `index` of `count`.

    Several files, or the built-in demo, are dealt one to a site (natural, non-IID); with more sites than files,
    the sites of one file share it at random. A single source is shared by `partition`.
    """
    from umbel.data.partition import files_of
    from umbel.data.sources import demo_sites

    if source == "demo:":
        parts = [f"demo:{n}" for n in demo_sites()]
    elif (
        partition in ("auto", "file")
        and not source.startswith(PUBLIC_SOURCES)
        and Path(source).expanduser().is_dir()
    ):
        parts = [str(p) for p in files_of(Path(source).expanduser())]
        if not parts:
            raise Refusal(RefusalKind.NO_DATA, f"the folder {source!r} has no data file")
    else:
        scheme = "iid" if partition in ("auto", "file") else partition
        return f"site-{index + 1:03d}", source, (index, count), scheme
    kind, turn = index % len(parts), index // len(parts)
    sharing = len(range(kind, count, len(parts)))
    stem = parts[kind].removeprefix("demo:") if parts[kind].startswith("demo:") else Path(parts[kind]).stem
    name = stem if sharing == 1 else f"{stem}-{turn + 1:03d}"
    return name, parts[kind], (turn, sharing), "iid"
