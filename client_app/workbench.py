"""What a process keeps warm between instructions: base model with adapter, tokenizer, tokenised rows.

A cache and never the truth: dropping any entry leaves every result bit-identical, because the instruction's
state overwrites all trainable tensors and all randomness comes from the instruction. Bounded: one model (many
virtual sites share it), tokenised rows of the last few sites.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from client_app.identity import Identity
from compression import Layout
from compression.roles import role_for
from umbel.config import Config, to_json
from umbel.errors import DataError, Refusal, RefusalKind
from umbel.models.adapter import AdaptedModule
from umbel.models.described import described

log = logging.getLogger("umbel.site")

KEEP_MODELS = 1
KEEP_DATASETS = 16


@dataclass
class SiteModel:
    """A loaded model that an instruction's state can be written into."""

    model: Any
    tokenizer: Any
    modules: list[AdaptedModule]
    layout: Layout
    device: str
    packing: bool
    load_seconds: float
    num_bytes: int = 0


@dataclass
class SiteData:
    """Tokenised rows of one site; `heldout` rows are never trained on."""

    train: list[Any]
    heldout: list[Any]
    counters: dict[str, int] = field(default_factory=dict)
    # What the server compares or shows besides, when the site joins.
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the token arrays."""
        if self.facts:
            # Memory maps of a tokenised corpus.
            return 0
        return sum(row.input_ids.nbytes + row.labels.nbytes for row in (*self.train, *self.heldout))


def pick_device(wanted: str) -> str:
    """Return 'cuda' or 'cpu'; asking for a GPU that is not there is refused."""
    import torch

    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise Refusal(
            RefusalKind.REFUSED, "train.device = 'cuda' but this site has no usable GPU; use 'auto' or 'cpu'"
        )
    return "cuda" if there and wanted != "cpu" else "cpu"


class Workbench:
    """Least-recently-used caches of models and datasets, one per process.

    `memory_bytes` bounds what they hold together, 0 is no bound. Rows of other sites or settings go first, then
    other models; what the instruction at hand needs stays, and if that alone is too much it is refused as `oom`.
    """

    def __init__(self, *, memory_bytes: int = 0) -> None:
        self.memory_bytes = memory_bytes
        self._models: OrderedDict[Hashable, SiteModel] = OrderedDict()
        self._datasets: OrderedDict[Hashable, SiteData] = OrderedDict()

    def model(self, config: Config) -> tuple[SiteModel, float]:
        """Return the model of `config` and the seconds spent loading it now (0.0 when it was warm)."""
        key = to_json(config, ("model", "lora")) + config.train.mode + config.train.device
        warm = key in self._models
        found = _fetch(self._models, key, KEEP_MODELS, lambda: load_site_model(config))
        if not warm:
            log.info("model %s loaded in %.1f s", config.model.name, found.load_seconds)
        self._fit(found.num_bytes)
        return found, 0.0 if warm else found.load_seconds

    def data(self, config: Config, site: Identity, tokenizer: Any) -> SiteData:
        """Return the site's tokenised rows; raises Refusal(NO_DATA) with the reason when there are none."""
        key = (
            to_json(config, ("data", "model")),
            config.run.task,
            config.run.seed,
            site.source,
            site.share,
            site.scheme,
        )
        warm = key in self._datasets
        found = _fetch(self._datasets, key, KEEP_DATASETS, lambda: load_site_data(config, site, tokenizer))
        if not warm:
            log.info("%d rows of site %s tokenised", len(found.train) + len(found.heldout), site.name)
        self._fit(found.num_bytes + sum(model.num_bytes for model in self._models.values()))
        return found

    def _fit(self, needed: int) -> None:
        """Drop the least recently used until the budget holds; the newest of each kind are in use."""
        if not self.memory_bytes:
            return
        if needed > self.memory_bytes:
            raise Refusal(
                RefusalKind.OOM,
                f"model and rows need {needed} bytes and this site's memory-bytes is {self.memory_bytes}",
            )
        while len(self._datasets) > 1 and self.held_bytes > self.memory_bytes:
            self._datasets.popitem(last=False)

    @property
    def held_bytes(self) -> int:
        """Bytes of all that is warm."""
        models = sum(model.num_bytes for model in self._models.values())
        return models + sum(data.num_bytes for data in self._datasets.values())

    def clear(self) -> None:
        """Drop everything that is warm."""
        self._models.clear()
        self._datasets.clear()


def _fetch(cache: OrderedDict, key: Hashable, size: int, build: Callable[[], Any]) -> Any:
    if key not in cache:
        # Before the new one is loaded: two base models at once may be more than the machine has.
        while len(cache) >= size:
            cache.popitem(last=False)
        cache[key] = build()
    cache.move_to_end(key)
    return cache[key]


def load_site_model(config: Config) -> SiteModel:
    """Load base, tokenizer and (in mode 'lora') a fresh adapter on the training device."""
    from umbel.models.adapter import adapted_modules, attach
    from umbel.models.packing import supports_packing
    from umbel.models.source import load_model, load_tokenizer
    from umbel.models.state import read_state

    started = time.monotonic()
    spec, settings = described(config)
    tokenizer = load_tokenizer(spec)
    model = load_model(spec)
    modules: list[AdaptedModule] = []
    if config.train.mode == "lora":
        model = attach(model, settings)
        modules = adapted_modules(model)
    else:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    device = pick_device(config.train.device)
    model = model.to(device)
    layout = Layout.from_arrays(read_state(model, config.train.mode), role_for)
    packing = config.data.packing and supports_packing(model)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    return SiteModel(
        model, tokenizer, modules, layout, device, packing, time.monotonic() - started, num_bytes
    )


def load_site_data(config: Config, site: Identity, tokenizer: Any) -> SiteData:
    """Read, share out, split and tokenise the rows of one site."""
    if config.run.task == "pretrain":
        return load_site_corpus(config, site, tokenizer)
    from umbel.data.encode import encode_rows
    from umbel.data.formats import detect_format
    from umbel.data.partition import partition
    from umbel.data.sources import load_rows
    from umbel.data.split import heldout_split

    d = config.data
    try:
        rows = load_rows(site.source)
        index, count = site.share
        if count > 1:
            parts = partition(
                rows, count, site.scheme, seed=config.run.seed, alpha=d.dirichlet_alpha, column=d.label_column
            )
            rows = [rows[i] for i in parts[index]]
        if d.limit:
            rows = rows[: d.limit]
        row_format = detect_format(rows, d.format)
        train_index, heldout_index = heldout_split(rows, d.heldout_fraction, max_heldout=d.heldout_max)
        train, heldout = (
            encode_rows(
                [rows[i] for i in picked],
                row_format,
                tokenizer,
                max_length=d.max_length,
                completion_only=d.completion_only,
            )
            for picked in (train_index, heldout_index)
        )
    except DataError as error:
        raise Refusal(RefusalKind.NO_DATA, str(error)) from error
    counts = train.counts.as_dict()
    if not train.rows:
        raise Refusal(
            RefusalKind.NO_DATA,
            f"no row of this site is left to train on: {json.dumps(counts, sort_keys=True)}. "
            f"data.max-length is {d.max_length}",
        )
    return SiteData(train.rows, heldout.rows, counts)


def load_site_corpus(config: Config, site: Identity, tokenizer: Any) -> SiteData:
    """Return the blocks of a site's corpus, tokenised on first use under its state folder.

    Under `data.leases = 'server'` every site must hold the same corpus, of which no share is taken.
    """
    from umbel.data.tokens import blocks_of, load_corpus
    from umbel.models.fingerprint import tokenizer_fingerprint

    d, common = config.data, config.data.leases == "server"
    try:
        corpus = load_corpus(
            site.source,
            tokenizer,
            tokenizer_fingerprint(tokenizer),
            site.state_dir / ".tokens",
            share=(0, 1) if common else site.share,
            limit=d.limit,
        )
        train, heldout = blocks_of(corpus, d.max_length, fraction=d.heldout_fraction, most=d.heldout_max)
    except DataError as error:
        raise Refusal(RefusalKind.NO_DATA, str(error)) from error
    counts = {"tokens": corpus.num_tokens, "blocks": len(train), "heldout_blocks": len(heldout)}
    # A private corpus is named in the record and compared with nobody's.
    return SiteData(train, heldout, counts, {"corpus" if common else "own_corpus": corpus.digest})  # type: ignore[arg-type]
