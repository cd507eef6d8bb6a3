"""The contract both sides of an Umbel federation share: config, messages, models, data, telemetry, cli."""

__version__ = "0.1.0"
