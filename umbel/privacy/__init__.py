"""Differential privacy at the level of a site: clipping, noise and the account of what was spent."""
