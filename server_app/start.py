"""What a run starts from: the tensors' layout, the first state, the scales and the reference fingerprints.

For an adapter the server needs no weights: shapes come from the model's configuration on the meta device and the
first adapter from the run's seed, so that no site draws its own. For full training the first state is the base.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from compression import Layout
from compression.roles import role_for
from umbel.config import Config
from umbel.errors import ModelError
from umbel.models.adapter import AdaptedModule
from umbel.models.described import described
from umbel.models.lora import LoraSettings
from umbel.models.source import ModelSpec
from umbel.seeds import derive_seed

log = logging.getLogger("umbel.server")


@dataclass
class Start:
    """The first state of a run and everything that names it."""

    spec: ModelSpec
    settings: LoraSettings
    modules: list[AdaptedModule]
    layout: Layout
    state: dict[str, np.ndarray]
    reference: dict[str, str]

    @property
    def scales(self) -> dict[str, float]:
        """Scale of every adapted module by its canonical name."""
        return {m.name: m.scale for m in self.modules}


def prepare(config: Config) -> Start:
    """Return the start of a new run; raises ModelError when the model cannot be described on this machine."""
    from umbel.models.adapter import adapted_modules, attach, initial_adapter
    from umbel.models.fingerprint import adapter_fingerprint, base_fingerprint, tokenizer_fingerprint
    from umbel.models.source import drawn_model, load_model, load_tokenizer, meta_model
    from umbel.models.state import read_state

    spec, settings = described(config)
    modules: list[AdaptedModule] = []
    if config.train.mode == "lora":
        modules = adapted_modules(attach(meta_model(spec), settings))
        state = initial_adapter(modules, settings, config.run.seed)
    else:
        from_scratch = config.run.task == "pretrain" and not spec.has_weights
        seed = derive_seed(config.run.seed, "weights")
        state = read_state(drawn_model(spec, seed) if from_scratch else load_model(spec), "full")
    layout = Layout.from_arrays(state, role_for)
    reference = {
        "layout": layout.digest(),
        "adapter": adapter_fingerprint(settings, modules) if modules else "",
        "tokenizer": tokenizer_fingerprint(load_tokenizer(spec)),
        "model": "",
    }
    if config.run.task == "split":
        # No site holds the whole base: the halves are compared when they meet.
        return Start(spec, settings, modules, layout, state, reference)
    try:
        reference["model"] = base_fingerprint(spec)
    except ModelError as error:
        log.info("the server has no base weights (%s); sites are compared with each other", error)
    return Start(spec, settings, modules, layout, state, reference)
