"""The LoRA aggregation rules: pure functions from the sites' factors to what is served, one rule a file."""
