"""The model a site holds between rounds, where the way down is lossy: frames change it, so it must not be lost.

    held-<digest>.safetensors      under <state-dir>/<run>/<site>/, the newest two

A message brings the frames since some version, or a snapshot, or nothing. They are applied to the newest model on
disk that is on the way, checked digest by digest (`compression.downlink.follow`), and the result is durable before any
work begins: a site that crashes afterwards goes on from there. Nothing on disk that fits is a gap: the site says what it
has, and is sent what it lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compression import FrameError, Layout
from compression.downlink import CatchUp, digest_of, follow, since, unpack
from umbel.errors import Refusal, RefusalKind
from umbel.fsio import write_atomic
from umbel.tensorfile import dump_tensors, load_tensors

log = logging.getLogger("umbel.site")

KEEP = 2


class Held:
    """The models of one (run, site) on disk, newest last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def digests(self) -> list[str]:
        """Return the names of the models that are there, oldest first."""
        files = sorted(self.folder.glob("held-*.safetensors"), key=lambda p: (p.stat().st_mtime_ns, p.name))
        return [p.stem.removeprefix("held-") for p in files]

    def load(self, digest: str, layout: Layout) -> dict[str, np.ndarray] | None:
        """Return the model of that name; None, and the file gone, when it is damaged."""
        path = self._path(digest)
        try:
            arrays = load_tensors(path.read_bytes())
            if digest_of(arrays, layout) == digest:
                return arrays
            problem = "its content is not what its name says"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        log.warning("the model %s cannot be read: %s", path.name, problem)
        path.unlink(missing_ok=True)
        return None

    def store(self, digest: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a model durably and drop the oldest."""
        write_atomic(self._path(digest), dump_tensors(arrays))
        for old in self.digests()[:-KEEP]:
            self._path(old).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self.folder / f"held-{digest}.safetensors"


def receive(folder: Path, data: bytes, document: Mapping[str, Any], layout: Layout) -> dict[str, np.ndarray]:
    """Return the model after a message's frames or snapshot, durable under `folder`.

    Raises Refusal (a gap) naming what this site holds when the frames do not lead on from any of it, or do not give
    the model they name.
    """
    held = Held(folder)
    update = unpack(b"" if data == b"\x00" else data, document)
    if update.snapshot is not None:
        model = follow({}, layout, update)
        held.store(update.digest, model)
        return model
    return _from_disk(held, update, layout)


def _from_disk(held: Held, update: CatchUp, layout: Layout) -> dict[str, np.ndarray]:
    while (found := since(update, held.digests())) is not None:
        start, rest = found
        arrays = held.load(start, layout)
        if arrays is None:
            continue
        return _advanced(held, arrays, rest, layout)
    have = held.digests()
    # The server reads the name back: the next message starts from there.
    raise Refusal(
        RefusalKind.GAP,
        f"the frames do not lead on from what this site holds: {have[-1] if have else 'nothing'}",
    )


def _advanced(
    held: Held, arrays: dict[str, np.ndarray], rest: CatchUp, layout: Layout
) -> dict[str, np.ndarray]:
    if not rest.frames:
        return arrays
    try:
        model = follow(arrays, layout, rest)
    except FrameError as error:
        # Not said to be held: only a snapshot helps now.
        raise Refusal(
            RefusalKind.GAP, f"the frames received are no good here ({error}), holding nothing"
        ) from error
    held.store(rest.digest, model)
    return model


def newest_held(folder: Path, site_model: Any, mode: str) -> str:
    """Return the name of the newest model held for a run; a model of which all is trained is held as it was loaded.

    A run from scratch, or from weights that every site has, then begins without sending them.
    """
    held = Held(folder)
    found = held.digests()
    if found or mode != "full":
        return found[-1] if found else ""
    from umbel.models.state import read_state

    arrays = read_state(site_model.model, mode)
    digest = digest_of(arrays, site_model.layout)
    held.store(digest, arrays)
    return digest
