"""A run's configuration as the model room describes it: one place, so that server, site and export agree."""

from __future__ import annotations

from umbel.config.schema import Config
from umbel.models.lora import LoraSettings
from umbel.models.source import ModelSpec


def described(config: Config) -> tuple[ModelSpec, LoraSettings]:
    """Return model and adapter of a configuration as `umbel.models` describes them."""
    m, a = config.model, config.lora
    spec = ModelSpec(
        m.name,
        m.revision,
        m.dtype,
        m.attention,
        m.gradient_checkpointing,
        quantization=m.quantization,
        scratch=config.run.task == "pretrain",
        tokenizer=m.tokenizer,
    )
    settings = LoraSettings(
        rank=a.rank,
        alpha=a.alpha,
        dropout=a.dropout,
        target_modules=a.target_modules,
        rslora=a.rslora,
        rank_pattern=a.rank_pattern,
        alpha_pattern=a.alpha_pattern,
        dtype=a.dtype,
    )
    return spec, settings
