"""Typed, frozen configuration: the only place that reads a run config."""

from umbel.config.load import from_json, from_run_config, resolve, to_flat, to_json, to_toml
from umbel.config.schema import Config

__all__ = ["Config", "from_json", "from_run_config", "resolve", "to_flat", "to_json", "to_toml"]
